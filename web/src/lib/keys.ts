/** The keyboard, beyond what a browser does by itself. Pages add their own while they are shown. */

import { router } from "./router.svelte";
import { look } from "./state.svelte";

export type Keys = Record<string, () => void>;
const layers: Keys[] = [];

/** Keys of a page, until the function that it returns is called. */
export function bindKeys(keys: Keys): () => void {
  layers.push(keys);
  return () => layers.splice(layers.indexOf(keys), 1);
}

function typing(target: EventTarget | null): boolean {
  const at = target as HTMLElement | null;
  return !!at && (/^(INPUT|TEXTAREA|SELECT)$/.test(at.tagName) || at.isContentEditable || !!at.closest?.(".xterm"));
}

export function startKeys(help: () => void): () => void {
  let waiting = "";
  const always: Keys = {
    "?": help,
    t: () => look.next(),
    n: () => router.go("/new"),
    "g r": () => router.go("/"),
    "g s": () => router.go("/sandboxes"),
    "g h": () => router.go("/health"),
    "/": () => document.querySelector<HTMLElement>("[data-search]")?.focus(),
  };
  const down = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (typing(event.target)) {
      if (event.key === "Escape") (event.target as HTMLElement).blur();
      return;
    }
    if (document.querySelector("dialog[open]")) return;
    const pressed = waiting ? `${waiting} ${event.key}` : event.key;
    waiting = "";
    for (const keys of [...layers].reverse().concat(always)) {
      const act = keys[pressed];
      if (act) {
        event.preventDefault();
        act();
        return;
      }
    }
    if (event.key === "g") waiting = "g";
  };
  addEventListener("keydown", down);
  return () => removeEventListener("keydown", down);
}

/** Moves the focus among links and buttons that are marked as rows. */
export function moveFocus(by: 1 | -1) {
  const rows = [...document.querySelectorAll<HTMLElement>("[data-row]")];
  const at = rows.indexOf(document.activeElement as HTMLElement);
  const next = rows[at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + by))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}
