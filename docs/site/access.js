// What the theme lacks for those who use a keyboard or a screen reader.
"use strict";

function mend(page) {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  // Whatever scrolls sideways can be scrolled with the arrow keys.
  for (const wide of page.querySelectorAll(".md-typeset__scrollwrap, pre > code")) {
    wide.tabIndex = 0;
  }
  // The buttons of a block of code are no place to navigate to.
  for (const buttons of page.querySelectorAll("nav.md-code__nav")) {
    buttons.setAttribute("role", "presentation");
  }
}

document$.subscribe(() => {
  const page = document.querySelector(".md-content");
  mend(page);
  // The theme adds buttons and wraps tables when they come into view.
  new MutationObserver(() => mend(page)).observe(page, { childList: true, subtree: true });
});
