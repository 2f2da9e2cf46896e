"use strict";
for (const button of document.querySelectorAll(".over button")) {
  button.addEventListener("click", () => {
    for (const other of document.querySelectorAll(".over button")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    for (const chart of document.querySelectorAll(".chart")) {
      chart.hidden = chart.dataset.over !== button.dataset.over;
    }
  });
}
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    for (const line of document.querySelectorAll(`.run[data-run="${button.dataset.run}"]`)) {
      line.classList.toggle("off", !shown);
    }
  });
}
