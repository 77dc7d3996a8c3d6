// A line may not begin with a full stop: keep punctuation with the formula before it.
document.addEventListener("DOMContentLoaded", () => {
  for (const formula of document.querySelectorAll("article span.math")) {
    const next = formula.nextSibling;
    if (next?.nodeType !== Node.TEXT_NODE) continue;
    const mark = next.data.match(/^[.,;:!?)\]’”]+/)?.[0];
    if (!mark) continue;
    const kept = document.createElement("span");
    kept.className = "kept";
    formula.replaceWith(kept);
    kept.append(formula, mark);
    next.data = next.data.slice(mark.length);
  }
});
