/**
 * A run's events as they happen. Every event has a position; what was seen is asked for no more, so after a lost
 * connection or a restarted server nothing is missing and nothing comes twice.
 *
 * A page that nobody looks at lets go of its connection (browsers have six for a server) and catches up when it is seen.
 */

import type { Event } from "../api/schema";
import { address, failure, query } from "./api";
import { net, session } from "./state.svelte";

export type Delta = { reset?: boolean; text?: string; thinking?: string; tool?: string; output?: string };

export type Listener = {
  /** In order, each once. */
  events(batch: Event[]): void;
  live?(fork: number, delta: Delta): void;
  /** All that was recorded so far is told. */
  caughtUp?(): void;
  end?(): void;
};

export type Wanted = { run: string; fork?: number; types?: string; after?: number; live?: boolean };

const FIRST_WAIT_MS = 500;
const MAX_WAIT_MS = 5000;
/** The server says something every 15 s: a connection that is silent for longer is dead. */
const SILENCE_MS = 40_000;
const HIDDEN_MS = 30_000;

export function follow(wanted: Wanted, listener: Listener): () => void {
  const stream = new Stream(wanted, listener);
  return () => stream.stop();
}

class Stream {
  #last: number;
  #stopped = false;
  #abort = new AbortController();
  #wake: (() => void) | null = null;
  #hidden: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private wanted: Wanted,
    private listener: Listener,
  ) {
    this.#last = wanted.after ?? 0;
    document.addEventListener("visibilitychange", this.#visibility);
    addEventListener("online", this.#now);
    void this.#run();
  }

  stop() {
    this.#stopped = true;
    document.removeEventListener("visibilitychange", this.#visibility);
    removeEventListener("online", this.#now);
    clearTimeout(this.#hidden);
    this.#abort.abort();
    this.#wake?.();
    net.forget(this);
  }

  #now = () => this.#wake?.();

  #visibility = () => {
    clearTimeout(this.#hidden);
    if (document.visibilityState === "visible") this.#wake?.();
    else this.#hidden = setTimeout(() => this.#abort.abort(), HIDDEN_MS);
  };

  async #run() {
    let wait = FIRST_WAIT_MS;
    while (!this.#stopped) {
      if (document.visibilityState === "hidden" && this.#abort.signal.aborted) {
        await this.#rest(null);
        continue;
      }
      const before = this.#last;
      let why = "the connection was closed";
      try {
        if (await this.#once()) {
          net.forget(this);
          return;
        }
      } catch (e) {
        why = e instanceof Fatal ? e.message : "the server does not answer";
        if (e instanceof Fatal) {
          net.forget(this);
          return;
        }
      }
      if (this.#stopped) return;
      if (document.visibilityState === "visible") net.lost(why, this);
      wait = this.#last > before ? FIRST_WAIT_MS : Math.min(wait * 2, MAX_WAIT_MS);
      await this.#rest(wait);
    }
  }

  #rest(ms: number | null): Promise<void> {
    return new Promise((done) => {
      const timer = ms === null ? undefined : setTimeout(() => this.#wake?.(), ms);
      this.#wake = () => {
        clearTimeout(timer);
        this.#wake = null;
        done();
      };
    });
  }

  /** True: the run has ended and everything is told. */
  async #once(): Promise<boolean> {
    this.#abort = new AbortController();
    const { run, fork, types, live } = this.wanted;
    const path = `/runs/${encodeURIComponent(run)}/events/stream${query({ fork, types, live })}`;
    const headers: Record<string, string> = { accept: "text/event-stream" };
    if (this.#last > 0) headers["last-event-id"] = String(this.#last);
    const response = await fetch(address(path), { headers, signal: this.#abort.signal, credentials: "same-origin" });
    if (response.status === 204) {
      this.listener.end?.();
      return true;
    }
    if (!response.ok || !response.body) {
      const error = await failure(response);
      if (response.status === 401) session.end(error.message);
      if (response.status >= 400 && response.status < 500 && response.status !== 429) throw new Fatal(error.message);
      throw error;
    }
    net.reached(this);
    return await this.#read(response.body);
  }

  async #read(body: ReadableStream<Uint8Array>): Promise<boolean> {
    const reader = body.getReader();
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const silent = setTimeout(() => this.#abort.abort(), SILENCE_MS);
      const { value, done } = await reader.read().finally(() => clearTimeout(silent));
      if (done) return false;
      rest += decoder.decode(value, { stream: true });
      const blocks = rest.split("\n\n");
      rest = blocks.pop() ?? "";
      if (this.#told(blocks)) return true;
    }
  }

  #told(blocks: string[]): boolean {
    let batch: Event[] = [];
    const flush = () => {
      if (batch.length > 0) this.listener.events(batch);
      batch = [];
    };
    for (const block of blocks) {
      let name = "";
      let data = "";
      for (const field of block.split("\n")) {
        if (field.startsWith("event: ")) name = field.slice(7);
        else if (field.startsWith("data: ")) data += field.slice(6);
      }
      if (name === "" && data !== "") {
        const event = JSON.parse(data) as Event;
        if (event.position <= this.#last) continue;
        this.#last = event.position;
        batch.push(event);
        continue;
      }
      flush();
      if (name === "live") {
        const { fork, delta } = JSON.parse(data) as { fork: number; delta: Delta };
        this.listener.live?.(fork, delta);
      } else if (name === "caught_up") this.listener.caughtUp?.();
      else if (name === "end") {
        this.listener.end?.();
        return true;
      }
    }
    flush();
    return false;
  }
}

class Fatal extends Error {}
