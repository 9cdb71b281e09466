// What scrolls sideways can be reached and scrolled with the keyboard.
(() => {
  const mark = () => {
    for (const e of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) {
      if (e.scrollWidth > e.clientWidth) e.tabIndex = 0; else e.removeAttribute("tabindex");
    }
  };
  window.addEventListener("load", mark);
  window.addEventListener("resize", mark);
})();
