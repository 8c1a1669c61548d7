import "./app.css";
import { mount } from "svelte";
import App from "./App.svelte";

/** A page that was loaded just now would fail the same way again. */
const FRESH_MS = 10_000;
// A page that is older than its server asks for parts that are no longer there.
addEventListener("vite:preloadError", () => {
  if (performance.now() > FRESH_MS) location.reload();
});

const target = document.getElementById("app");
if (target) mount(App, { target });
