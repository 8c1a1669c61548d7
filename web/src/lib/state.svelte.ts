/** What all pages share: whether the server can be reached, who is logged in, the theme, the time. */

import type { About, Scope, Whoami } from "../api/schema";

class Net {
  /** Since when nothing was heard; null while all is well. */
  lostAt = $state<number | null>(null);
  why = $state("");
  /** Streams that are open now, of those that should be. */
  #waiting = new Set<object>();

  lost(why: string, who?: object) {
    if (who) this.#waiting.add(who);
    this.lostAt ??= Date.now();
    this.why = why;
  }
  /** A request was answered, or a stream is open again. */
  reached(who?: object) {
    if (who) this.#waiting.delete(who);
    if (this.#waiting.size === 0) this.lostAt = null;
  }
  forget(who: object) {
    this.#waiting.delete(who);
    if (this.#waiting.size === 0) this.lostAt = null;
  }
}
export const net = new Net();

class Session {
  who = $state<Whoami | null>(null);
  about = $state<About | null>(null);
  /** Why one has to log in. */
  ended = $state<string | null>(null);

  end(why: string) {
    this.who = null;
    this.ended = why;
  }
  can(scope: Scope): boolean {
    const rank: Record<Scope, number> = { read: 0, steer: 1, admin: 2 };
    return this.who !== null && rank[this.who.scope] >= rank[scope];
  }
}
export const session = new Session();

export type Theme = "auto" | "light" | "dark";

class Look {
  theme = $state<Theme>("auto");

  constructor() {
    const kept = localStorage.getItem("theme");
    if (kept === "light" || kept === "dark") this.set(kept);
  }
  set(theme: Theme) {
    this.theme = theme;
    if (theme === "auto") {
      localStorage.removeItem("theme");
      delete document.documentElement.dataset.theme;
    } else {
      localStorage.setItem("theme", theme);
      document.documentElement.dataset.theme = theme;
    }
  }
  next() {
    this.set(this.theme === "auto" ? "light" : this.theme === "light" ? "dark" : "auto");
  }
}
export const look = new Look();

/** Ticks once a second for what is told in relative time. */
class Clock {
  now = $state(Date.now());
  constructor() {
    setInterval(() => {
      if (document.visibilityState === "visible") this.now = Date.now();
    }, 1000);
  }
}
export const clock = new Clock();

/** Short notes at the edge of the page; read out by screen readers. */
class Notes {
  list = $state<{ id: number; text: string; bad: boolean }[]>([]);
  #next = 0;

  /** What went wrong, and what helps. */
  fail(e: unknown) {
    const { message, hint } = e as { message: string; hint?: string };
    this.say(hint ? `${message} What helps: ${hint}` : message, true);
  }

  say(text: string, bad = false) {
    const id = this.#next++;
    this.list = [...this.list.slice(-2), { id, text, bad }];
    setTimeout(() => (this.list = this.list.filter((n) => n.id !== id)), bad ? 9000 : 4000);
  }
}
export const notes = new Notes();
