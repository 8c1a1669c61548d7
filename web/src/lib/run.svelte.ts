/** A run as it is now: its state from the API, what its forks do from its events. */

import type { Event, EventPage, RunDetail } from "../api/schema";
import { ApiError, get, query } from "./api";
import { doing } from "./session";
import { follow } from "./stream";

/** Events from before this page was opened that are looked at for what forks do now. */
const LOOK_BACK = 400;
const PAGE = 500;
/** Changes that come together are asked for once. */
const GATHER_MS = 250;

export type Segment = { fork: number | null; task: string; from: number; to: number | null; failed: boolean };

export class LiveRun {
  detail = $state.raw<RunDetail | null>(null);
  error = $state.raw<ApiError | null>(null);
  /** What each fork does, in a line. */
  doing = $state<Record<number, string>>({});
  /** How far each fork's agent is, by its last event. */
  turns = $state<Record<number, number>>({});
  segments = $state.raw<Segment[]>([]);
  verdicts = $state.raw<Record<number, { output: string; exit: number | null; tests: string[] }>>({});
  warnings = $state.raw<string[]>([]);
  #open = new Map<string, Segment>();
  #stop: (() => void) | null = null;
  #timer: ReturnType<typeof setTimeout> | undefined;
  #stopped = false;
  #words: Record<number, string> = {};

  constructor(readonly id: string) {
    void this.#begin();
  }

  stop() {
    this.#stopped = true;
    this.#stop?.();
    clearTimeout(this.#timer);
  }

  async #begin() {
    while (!this.#stopped) {
      try {
        await this.refresh();
        await this.#past();
        break;
      } catch (e) {
        if (!(e instanceof ApiError)) throw e;
        this.error = e;
        if (e.status >= 400 && e.status < 500) return;
        await new Promise((done) => setTimeout(done, 2000));
      }
    }
    if (this.#stopped || !this.detail) return;
    const after = Math.max(0, this.detail.position - LOOK_BACK);
    this.#stop = follow(
      { run: this.id, after, live: true },
      {
        events: (batch) => this.#heard(batch),
        live: (fork, delta) => {
          if (delta.reset) this.#words[fork] = "";
          if (delta.text) {
            this.#words[fork] = ((this.#words[fork] ?? "") + delta.text).slice(-400);
            this.doing[fork] = this.#words[fork];
          } else if (delta.tool) this.doing[fork] = delta.tool;
        },
        caughtUp: () => this.#soon(),
        end: () => this.#soon(),
      },
    );
  }

  async refresh() {
    this.detail = await get<RunDetail>(`/runs/${encodeURIComponent(this.id)}`);
    this.error = null;
  }

  /** Steps of the run and its forks from the beginning: there are few. */
  async #past() {
    let after = 0;
    for (;;) {
      const path = `/runs/${encodeURIComponent(this.id)}/events${query({ after, types: "run.*,fork.*", limit: PAGE })}`;
      const page = await get<EventPage>(path);
      page.events.forEach((e) => this.#step(e));
      this.segments = [...this.segments];
      if (!page.next_after) return;
      after = page.next_after;
    }
  }

  #seen = 0;

  #step(event: Event) {
    if (event.position <= this.#seen) return;
    this.#seen = event.position;
    const d = event.data as Record<string, any>;
    const key = `${event.fork ?? "run"}/${d?.serial}`;
    if (/^(run|fork)\.task_started$/.test(event.type)) {
      const segment = { fork: event.fork ?? null, task: String(d.task?.task ?? ""), from: event.at, to: null, failed: false };
      this.#open.set(key, segment);
      this.segments.push(segment);
    } else if (/^(run|fork)\.task_/.test(event.type)) {
      const segment = this.#open.get(key);
      if (segment) {
        segment.to = event.at;
        segment.failed = event.type.endsWith("failed");
        this.#open.delete(key);
      }
    } else if (event.type === "fork.ended" && event.fork !== null && event.fork !== undefined) {
      const { verdict, collected } = d.result ?? {};
      const tests = (collected?.edited_tests ?? []).map(String);
      this.verdicts = { ...this.verdicts, [event.fork]: { output: String(verdict?.output ?? ""), exit: verdict?.exit_code ?? null, tests } };
    } else if (event.type === "run.budget_warning") {
      this.warnings = [...this.warnings, "80 % of a budget is used."];
    }
  }

  #heard(batch: Event[]) {
    let changed = false;
    for (const event of batch) {
      if (event.fork !== null && event.fork !== undefined) {
        const text = doing(event);
        if (text !== null) this.doing[event.fork] = text;
        if (event.type === "agent.assistant_message") this.#words[event.fork] = "";
        const { turn } = (event.data ?? {}) as { turn?: unknown };
        if (typeof turn === "number") this.turns[event.fork] = turn;
      }
      if (!event.type.startsWith("agent.")) this.#step(event);
      changed = true;
    }
    if (changed) {
      this.segments = [...this.segments];
      this.#soon();
    }
  }

  #soon() {
    if (this.#timer !== undefined) return;
    this.#timer = setTimeout(() => {
      this.#timer = undefined;
      this.refresh().catch(() => {});
    }, GATHER_MS);
  }
}
