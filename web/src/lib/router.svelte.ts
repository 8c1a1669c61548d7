/** Addresses of the page. Every view has one, so that a link to it can be sent to somebody. */

export type Route =
  | { page: "runs" }
  | { page: "new" }
  | { page: "run"; run: string }
  | { page: "fork"; run: string; fork: number }
  | { page: "compare"; run: string }
  | { page: "sandboxes" }
  | { page: "sandbox"; sandbox: string }
  | { page: "health" }
  | { page: "login" }
  | { page: "nowhere" };

function read(path: string): Route {
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  const [first, second, third, fourth] = parts;
  if (parts.length === 0 || (first === "runs" && parts.length === 1)) return { page: "runs" };
  if (parts.length === 1) {
    if (first === "new" || first === "health" || first === "sandboxes" || first === "login") return { page: first };
    return { page: "nowhere" };
  }
  if (first === "sandboxes" && second && parts.length === 2) return { page: "sandbox", sandbox: second };
  if (first === "runs" && second) {
    if (parts.length === 2) return { page: "run", run: second };
    if (third === "compare" && parts.length === 3) return { page: "compare", run: second };
    if (third === "forks" && fourth && /^\d+$/.test(fourth) && parts.length === 4) {
      return { page: "fork", run: second, fork: Number(fourth) };
    }
  }
  return { page: "nowhere" };
}

function safeRead(path: string): Route {
  try {
    return read(path);
  } catch {
    return { page: "nowhere" };
  }
}

class Router {
  route = $state<Route>(safeRead(location.pathname));
  search = $state.raw(new URLSearchParams(location.search));
  hash = $state(location.hash);
  /** The view as a key: another one starts afresh. */
  key = $derived(JSON.stringify(this.route));

  constructor() {
    addEventListener("popstate", () => this.#update());
    addEventListener("click", (event) => this.#click(event));
  }

  #update() {
    this.route = safeRead(location.pathname);
    this.search = new URLSearchParams(location.search);
    this.hash = location.hash;
  }

  go(to: string, replace = false) {
    if (replace) history.replaceState(null, "", to);
    else history.pushState(null, "", to);
    const before = this.key;
    this.#update();
    if (!replace && this.key !== before) scrollTo(0, 0);
  }

  /** One value of the query; null takes it out. */
  set(key: string, value: string | null, replace = true) {
    const search = new URLSearchParams(location.search);
    if (value === null || value === "") search.delete(key);
    else search.set(key, value);
    const text = search.toString();
    this.go(location.pathname + (text ? `?${text}` : "") + location.hash, replace);
  }

  /** Links of our own are followed without loading the page anew. */
  #click(event: MouseEvent) {
    if (event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    const link = (event.target as Element | null)?.closest?.("a");
    if (!link || link.target || link.hasAttribute("download") || link.origin !== location.origin) return;
    if (link.pathname.startsWith("/api/")) return;
    event.preventDefault();
    this.go(link.pathname + link.search + link.hash);
  }
}
export const router = new Router();
