"use strict";
(function () {
  var root = document.documentElement;
  var button = document.getElementById("theme");
  var system = window.matchMedia("(prefers-color-scheme: dark)");

  function stored(value) {  // a page opened from a file may not be allowed to remember
    try {
      if (value) localStorage.setItem("paceline-theme", value);
      return localStorage.getItem("paceline-theme");
    } catch (refused) {
      return null;
    }
  }
  function dark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
  }
  function name() {
    button.textContent = dark() ? "Light" : "Dark";
  }
  var chosen = stored();
  if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;
  button.hidden = false;
  button.addEventListener("click", function () {
    root.dataset.theme = dark() ? "light" : "dark";
    stored(root.dataset.theme);
    name();
  });
  system.addEventListener("change", name);
  name();

  var table = document.getElementById("all");
  if (!table) return;
  document.querySelectorAll(".script").forEach(function (element) { element.hidden = false; });
  function key(row, column) {
    var cell = row.cells[column];
    var text = cell.dataset.sort === undefined ? cell.textContent.trim() : cell.dataset.sort;
    var number = parseFloat(text.replace(/,/g, ""));
    return { text: text, number: isNaN(number) ? null : number };
  }
  function compare(a, b, numeric) {
    if (!numeric) return a.text.localeCompare(b.text);
    if (a.number === null || b.number === null) return (a.number === null) - (b.number === null);
    return a.number - b.number;
  }
  Array.prototype.forEach.call(table.tHead.rows[0].cells, function (head, column) {
    var control = document.createElement("button");
    control.type = "button";
    control.textContent = head.textContent;
    head.replaceChildren(control);
    control.addEventListener("click", function () {
      var up = head.getAttribute("aria-sort") !== "ascending";
      var numeric = head.classList.contains("number");
      var rows = Array.from(table.tBodies[0].rows);
      rows.sort(function (one, other) {
        var a = key(one, column), b = key(other, column);
        var missing = numeric && (a.number === null || b.number === null);  // dashes stay last either way
        return compare(a, b, numeric) * (up || missing ? 1 : -1);
      });
      Array.prototype.forEach.call(table.tHead.rows[0].cells, function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      table.tBodies[0].append.apply(table.tBodies[0], rows);
    });
  });
})();
