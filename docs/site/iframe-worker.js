// Browsers start no worker for a page that is opened as a file: there a frame runs the search.
"use strict";

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.early = []; // messages from before the script runs
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      frame.addEventListener("load", () => this.run(frame.contentWindow, url), { once: true });
      document.body.append(frame);
    }

    run(inner, url) {
      const script = inner.document.createElement("script");
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      script.src = url;
      script.addEventListener("load", () => {
        this.inner = inner;
        this.early.forEach((data) => this.postMessage(data));
      });
      inner.document.head.append(script);
    }

    postMessage(data) {
      if (this.inner) this.inner.dispatchEvent(new MessageEvent("message", { data }));
      else this.early.push(data);
    }
  };
}
