/** A fork's whole session: all its events, as cards; live, or as it was at any point of the past. */

import type { Event, Fork, RunDetail } from "../api/schema";
import { ApiError, get } from "./api";
import { Session, type Item } from "./session";
import { follow, type Delta } from "./stream";

const GATHER_MS = 250;
/** Live words that are shown, at most: the recorded message has all of them. */
const MAX_LIVE = 20_000;
/** While it is played again, no pause is longer than this. */
const MAX_GAP_MS = 1200;

export type Live = { text: string; thinking: string; tool: string; output: string };
const NOTHING: Live = { text: "", thinking: "", tool: "", output: "" };

export class LiveFork {
  detail = $state.raw<RunDetail | null>(null);
  error = $state.raw<ApiError | null>(null);
  items = $state.raw<Item[]>([]);
  live = $state.raw<Live>(NOTHING);
  /** Events that are known. */
  total = $state(0);
  caughtUp = $state(false);
  ended = $state(false);
  /** How many events are shown; null: all of them, and what comes. */
  shown = $state<number | null>(null);
  playing = $state(false);
  speed = $state(4);

  /** While an agent works its own reports are ahead of the fork's state. */
  turns = $state(0);
  toolCalls = $state(0);
  cost = $state(0);

  fork = $derived<Fork | null>(this.detail?.forks.find((f) => f.fork === this.number) ?? null);
  events: Event[] = [];
  #now = new Session();
  #past: Session | null = null;
  #stop: () => void;
  #gather: ReturnType<typeof setTimeout> | undefined;
  #frame = 0;
  #play: ReturnType<typeof setTimeout> | undefined;

  constructor(
    readonly run: string,
    readonly number: number,
  ) {
    void this.refresh().catch((e) => (this.error = e));
    this.#stop = follow(
      { run, fork: number, live: true },
      {
        events: (batch) => this.#heard(batch),
        live: (_, delta) => this.#said(delta),
        caughtUp: () => {
          this.caughtUp = true;
          this.#soon();
        },
        end: () => {
          this.caughtUp = true;
          this.ended = true;
          this.live = NOTHING;
          this.#soon();
        },
      },
    );
  }

  stop() {
    this.#stop();
    clearTimeout(this.#gather);
    clearTimeout(this.#play);
    cancelAnimationFrame(this.#frame);
  }

  async refresh() {
    this.detail = await get<RunDetail>(`/runs/${encodeURIComponent(this.run)}`);
    this.error = null;
    this.#count();
    if (!this.fork) throw new ApiError(404, "fork_not_found", `Run ${this.run} has no fork ${this.number}.`);
  }

  #count() {
    this.turns = Math.max(this.fork?.turns ?? 0, this.#now.turns);
    this.toolCalls = Math.max(this.fork?.tool_calls ?? 0, this.#now.toolCalls);
    this.cost = Math.max(this.fork?.cost_usd ?? 0, this.#now.cost);
  }

  #heard(batch: Event[]) {
    for (const event of batch) {
      this.events.push(event);
      this.#now.push(event);
      if (event.type === "agent.assistant_message") this.live = { ...NOTHING, tool: this.live.tool };
      else if (event.type === "agent.tool_completed") this.live = { ...this.live, output: "", tool: "" };
      else if (event.type === "agent.interrupted" || event.type === "fork.ended") this.live = NOTHING;
    }
    // Many batches of a long past make one picture.
    if (!this.#frame) {
      this.#frame = requestAnimationFrame(() => {
        this.#frame = 0;
        this.total = this.events.length;
        this.#count();
        if (this.shown === null) this.items = [...this.#now.items];
      });
    }
    this.#soon();
  }

  #said(delta: Delta) {
    const before = delta.reset ? NOTHING : this.live;
    this.live = {
      text: (before.text + (delta.text ?? "")).slice(-MAX_LIVE),
      thinking: (before.thinking + (delta.thinking ?? "")).slice(-MAX_LIVE),
      output: (before.output + (delta.output ?? "")).slice(-MAX_LIVE),
      tool: delta.tool ?? before.tool,
    };
  }

  #soon() {
    if (this.#gather !== undefined) return;
    this.#gather = setTimeout(() => {
      this.#gather = undefined;
      this.refresh().catch(() => {});
    }, GATHER_MS);
  }

  /** Shows the session as it was after so many events; null goes back to now. */
  seek(shown: number | null) {
    if (shown === null || shown >= this.events.length) {
      this.shown = null;
      this.#past = null;
      this.items = [...this.#now.items];
      this.playing = false;
      return;
    }
    // Forwards it goes on from where it is.
    if (!this.#past || this.#past.events > shown) this.#past = new Session();
    for (let i = this.#past.events; i < shown; i++) this.#past.push(this.events[i]!);
    this.shown = shown;
    this.items = [...this.#past.items];
  }

  play() {
    clearTimeout(this.#play);
    if (this.playing) {
      this.playing = false;
      return;
    }
    if (this.shown === null) this.seek(0);
    this.playing = true;
    this.#next();
  }

  #next() {
    if (!this.playing || this.shown === null) return;
    const [a, b] = [this.events[Math.max(0, this.shown - 1)], this.events[this.shown]];
    const gap = a && b ? Math.min(MAX_GAP_MS, b.at - a.at) / this.speed : 0;
    this.#play = setTimeout(() => {
      if (this.shown !== null) this.seek(this.shown + 1);
      this.#next();
    }, Math.max(30, gap));
  }
}
