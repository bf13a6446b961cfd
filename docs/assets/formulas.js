// Renders the formulas of every page with the KaTeX of this site; also after instant navigation.
const render = () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const text = element.textContent.trim();
    const display = text.startsWith("\\[");
    katex.render(text.slice(2, -2), element, { displayMode: display, throwOnError: false, macros: { "\\bm": "\\boldsymbol{#1}" } });
  }
};
if (typeof document$ === "undefined") document.addEventListener("DOMContentLoaded", render);
else document$.subscribe(render);
