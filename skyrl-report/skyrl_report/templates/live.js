"use strict";
// Keeps the page of `skyrl watch` fresh: asks for the state, and replaces the sections that have changed.
(() => {
  const INTERVAL_MS = 2000;
  let version = null;
  const banner = document.getElementById("live");

  function replaceSections(fresh) {
    const main = document.querySelector("main"), newMain = fresh.querySelector("main");
    const old = new Map([...main.children].map(element => [element.id || element.outerHTML, element]));
    const children = [...newMain.children].map(element => {
      const known = element.id ? old.get(element.id) : old.get(element.outerHTML);
      if (!known) return element;
      if (known.hasAttribute("data-keep")) return known;  // managed by a script
      if (known.outerHTML === element.outerHTML) return known;
      const open = [...known.querySelectorAll("details")].map(details => details.open);
      element.querySelectorAll("details").forEach((details, i) => { details.open = open[i] ?? details.open; });
      return element;
    });
    const focused = document.activeElement;
    children.forEach((element, i) => {
      if (main.children[i] !== element) main.insertBefore(element, main.children[i] ?? null);
    });
    while (main.children.length > children.length) main.lastElementChild.remove();
    if (focused && focused.isConnected) focused.focus({ preventScroll: true });
  }

  async function update() {
    try {
      const state = await (await fetch("state.json")).json();
      if (version !== null && state.version !== version) {
        const response = await fetch("report.html");
        const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
        state.version = response.headers.get("X-Run-Version") ?? state.version;  // the page may be older
        replaceSections(fresh);
        const data = document.getElementById("curve-data"), newData = fresh.getElementById("curve-data");
        if (!data && newData) location.reload();  // the first metrics: the page has no charts yet
        if (data && newData) data.textContent = newData.textContent;
        document.dispatchEvent(new Event("refreshed"));
      }
      version = state.version;
      banner.textContent = state.progress;
      banner.classList.remove("warning");
    } catch (error) {
      banner.textContent = "The server of skyrl watch does not answer; this page is not fresh.";
      banner.classList.add("warning");
    }
    setTimeout(update, INTERVAL_MS);
  }
  update();
})();
