/**
 * What happens, as it happens: a run's events, or the runs themselves. Every event has a position; what was seen is asked
 * for no more, so after a lost connection or a restarted server nothing is missing and nothing comes twice.
 *
 * A page that nobody looks at lets go of its connection (browsers have six for a server) and catches up when it is seen.
 */

import type { Event, Run } from "../api/schema";
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
  const stream = new RunEvents(wanted, listener);
  return () => stream.stop();
}

export type RunsListener = {
  /** The list should be read (again): what follows is what changes after that. */
  again(): void;
  run(run: Run): void;
  /** It is none of those that are asked for any more, or is gone. */
  gone(id: string): void;
  /** Nothing is heard until `again` comes. */
  lost(): void;
};

/** The runs that are asked for, as they change. */
export function followRuns(wanted: Record<string, string | boolean | null>, listener: RunsListener): () => void {
  const stream = new RunsNews(wanted, listener);
  return () => stream.stop();
}

type Message = { name: string; data: string };

/** One connection, made again whenever it is lost. */
abstract class Stream {
  #stopped = false;
  #abort = new AbortController();
  #wake: (() => void) | null = null;
  #hidden: ReturnType<typeof setTimeout> | undefined;

  protected abstract path(): string;
  protected headers(): Record<string, string> {
    return {};
  }
  /** Messages that came together. True: that was all, for ever. */
  protected abstract told(messages: Message[]): boolean;
  /** There is nothing to be told, now or later. */
  protected over(): void {}
  protected lost(): void {}

  protected start() {
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
      this.#heard = false;
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
          if (!this.#stopped) this.lost();
          return;
        }
      }
      if (this.#stopped) return;
      this.lost();
      if (document.visibilityState === "visible") net.lost(why, this);
      wait = this.#heard ? FIRST_WAIT_MS : Math.min(wait * 2, MAX_WAIT_MS);
      await this.#rest(wait);
    }
  }

  #heard = false;

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

  /** True: everything is told. */
  async #once(): Promise<boolean> {
    this.#abort = new AbortController();
    const headers = { accept: "text/event-stream", ...this.headers() };
    const response = await fetch(address(this.path()), { headers, signal: this.#abort.signal, credentials: "same-origin" });
    if (response.status === 204) {
      this.over();
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
      const messages = blocks.map(message).filter((m) => m.data !== "");
      if (messages.length > 0) this.#heard = true;
      if (this.told(messages)) return true;
    }
  }
}

function message(block: string): Message {
  const found = { name: "", data: "" };
  for (const field of block.split("\n")) {
    if (field.startsWith("event: ")) found.name = field.slice(7);
    else if (field.startsWith("data: ")) found.data += field.slice(6);
  }
  return found;
}

class RunEvents extends Stream {
  #last: number;

  constructor(
    private wanted: Wanted,
    private listener: Listener,
  ) {
    super();
    this.#last = wanted.after ?? 0;
    this.start();
  }

  protected path() {
    const { run, fork, types, live } = this.wanted;
    return `/runs/${encodeURIComponent(run)}/events/stream${query({ fork, types, live })}`;
  }
  protected override headers(): Record<string, string> {
    return this.#last > 0 ? { "last-event-id": String(this.#last) } : {};
  }
  protected override over() {
    this.listener.end?.();
  }

  protected told(messages: Message[]): boolean {
    let batch: Event[] = [];
    const flush = () => {
      if (batch.length > 0) this.listener.events(batch);
      batch = [];
    };
    for (const { name, data } of messages) {
      if (name === "") {
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

class RunsNews extends Stream {
  constructor(
    private wanted: Record<string, string | boolean | null>,
    private listener: RunsListener,
  ) {
    super();
    this.start();
  }

  protected path() {
    return `/runs/stream${query(this.wanted)}`;
  }
  protected override lost() {
    this.listener.lost();
  }

  protected told(messages: Message[]): boolean {
    for (const { name, data } of messages) {
      if (name === "again") this.listener.again();
      else if (name === "") {
        const news = JSON.parse(data) as { run: Run } | { gone: string };
        if ("run" in news) this.listener.run(news.run);
        else this.listener.gone(news.gone);
      }
    }
    return false;
  }
}

class Fatal extends Error {}
