import "./app.css";
import { mount } from "svelte";
import App from "./App.svelte";

// A page that is older than its server asks for parts that are no longer there.
addEventListener("vite:preloadError", () => location.reload());

const target = document.getElementById("app");
if (target) mount(App, { target });
