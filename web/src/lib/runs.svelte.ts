/** The runs that are asked for: read page by page, and kept as they are by what the server says of them. */

import type { Run, RunCounts, RunPage } from "../api/schema";
import { get, query } from "./api";
import { poll } from "./poll";
import { notes } from "./state.svelte";
import { followRuns } from "./stream";

const PAGE = 100;
/** How often the list is read while nothing is heard of it. */
const LOST_MS = 5000;
/** Runs that begin or end together are counted once. */
const COUNT_MS = 500;

export type Asked = { search: string; live: boolean; outcome: string };

/** Newest first; ids decide between runs of the same moment. */
const older = (a: Run, b: Run) => a.created_at < b.created_at || (a.created_at === b.created_at && a.id < b.id);

export class LiveRuns {
  list = $state.raw<Run[]>([]);
  counts = $state.raw<RunCounts | null>(null);
  cursor = $state<string | null>(null);
  loaded = $state(false);
  error = $state.raw<unknown>(null);
  #stop: () => void;
  /** Changes are told. */
  #open = false;
  #poll: (() => void) | null = null;
  /** So many are shown, if there are so many. */
  #wanted = PAGE;
  #count: ReturnType<typeof setTimeout> | undefined;
  #abort = new AbortController();
  /** Changes that came while the list was on its way. */
  #reading = 0;
  #missed: (() => void)[] = [];

  constructor(readonly asked: Asked) {
    const { search, live, outcome } = asked;
    this.#stop = followRuns(
      { search, live: live || null, outcome },
      {
        again: () => {
          this.#open = true;
          void this.load();
        },
        run: (run) => this.#when(() => this.#put(run)),
        gone: (id) => this.#when(() => this.#remove(id)),
        lost: () => {
          this.#open = false;
          this.#ask();
        },
      },
    );
  }

  stop() {
    this.#stop();
    this.#poll?.();
    clearTimeout(this.#count);
    this.#abort.abort();
  }

  /** Again and again, until it was read and changes are told. */
  #ask() {
    this.#poll ??= poll(() => this.load(), LOST_MS);
  }

  #path(more: Record<string, string | number | boolean | null>): string {
    const { search, live, outcome } = this.asked;
    return `/runs${query({ search, live: live || null, outcome, ...more })}`;
  }

  /** As many as are shown already, from the newest. */
  async load() {
    this.#reading++;
    try {
      let page = await get<RunPage>(this.#path({ limit: PAGE, counts: true }), this.#abort.signal);
      const list = page.runs;
      this.counts = page.counts ?? null;
      while (page.next_cursor && list.length < this.#wanted) {
        page = await get<RunPage>(this.#path({ limit: PAGE, cursor: page.next_cursor }), this.#abort.signal);
        list.push(...page.runs);
      }
      this.list = list;
      this.cursor = page.next_cursor ?? null;
      this.error = null;
      if (this.#open) {
        this.#poll?.();
        this.#poll = null;
      }
    } catch (e) {
      if (this.#abort.signal.aborted) return;
      this.error = e;
      this.#ask();
    } finally {
      this.#reading--;
    }
    this.loaded = true;
    if (this.#reading === 0) this.#missed.splice(0).forEach((change) => change());
  }

  async more() {
    try {
      const page = await get<RunPage>(this.#path({ limit: PAGE, cursor: this.cursor }), this.#abort.signal);
      const known = new Set(this.list.map((r) => r.id));
      this.list = [...this.list, ...page.runs.filter((r) => !known.has(r.id))];
      this.cursor = page.next_cursor ?? null;
      this.#wanted = this.list.length;
    } catch (e) {
      if (!this.#abort.signal.aborted) notes.fail(e);
    }
  }

  #when(change: () => void) {
    if (this.#reading > 0) this.#missed.push(change);
    else change();
  }

  #put(run: Run) {
    const at = this.list.findIndex((r) => r.id === run.id);
    const before = this.list[at];
    if (before) {
      // What was read may be newer than what was told on the way.
      if (before.updated_at > run.updated_at) return;
      this.list = this.list.with(at, run);
      if (before.outcome !== run.outcome || before.status !== run.status) this.#recount();
      return;
    }
    const next = this.list.findIndex((r) => older(r, run));
    if (next >= 0) this.list = this.list.toSpliced(next, 0, run);
    // Older than all that is shown: it is on a page that nobody asked for, unless there is none.
    else if (this.cursor === null) this.list = [...this.list, run];
    this.#recount();
  }

  #remove(id: string) {
    if (this.list.some((r) => r.id === id)) this.list = this.list.filter((r) => r.id !== id);
    this.#recount();
  }

  #recount() {
    this.#count ??= setTimeout(() => {
      this.#count = undefined;
      get<RunPage>(this.#path({ limit: 1, counts: true }), this.#abort.signal)
        .then((page) => (this.counts = page.counts ?? null))
        .catch(() => {});
    }, COUNT_MS);
  }
}
