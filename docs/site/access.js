// What the theme lacks for those who use a keyboard, a screen reader, or a narrow screen.
"use strict";

const LONG = 60; // letters in a cell of a table that need some room

function mend(page) {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  // Whatever scrolls sideways can be scrolled with the arrow keys.
  for (const wide of page.querySelectorAll(".md-typeset__scrollwrap, pre > code")) {
    if (wide.tabIndex !== 0) wide.tabIndex = 0;
  }
  for (const cell of page.querySelectorAll("td:not(.long)")) {
    if (cell.textContent.length > LONG) cell.classList.add("long");
  }
  // The buttons of a block of code are no place to navigate to.
  for (const buttons of page.querySelectorAll("nav.md-code__nav:not([role])")) {
    buttons.setAttribute("role", "presentation");
  }
}

document$.subscribe(() => {
  const page = document.querySelector(".md-content");
  mend(page);
  // The theme adds buttons and wraps tables when they come into view, and on another size of the
  // window takes the focus from blocks that have become too wide.
  const watched = { childList: true, subtree: true, attributeFilter: ["tabindex"] };
  new MutationObserver(() => mend(page)).observe(page, watched);
});
