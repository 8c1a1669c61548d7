/** How things are written. All that came from a repository or an agent goes through `plain` or `ansi` before it is shown. */

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

function picture(char: string): string {
  const code = char.charCodeAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
}

/** Characters that steer a terminal, or turn text around, as pictures of themselves. Tabs and line breaks stay. */
export function plain(text: string): string {
  return text.replace(/\r\n/g, "\n").replace(CONTROL, picture);
}

/** The same on one line. */
export function line(text: string, max = 200): string {
  const one = plain(text).replace(/\s+/g, " ").trim();
  return one.length > max ? `${one.slice(0, max - 1)}\u2026` : one;
}

export type Span = { text: string; style: string };

/** Output of a terminal: colours become classes, everything else that steers it is shown or left out. */
export function ansi(text: string): Span[] {
  const spans: Span[] = [];
  let style: string[] = [];
  const push = (raw: string) => {
    if (raw) spans.push({ text: plain(raw.replace(/\r(?!\n)/g, "\n")), style: style.join(" ") });
  };
  let at = 0;
  for (const found of text.matchAll(/\x1b\[([0-9;]*)m/g)) {
    push(text.slice(at, found.index));
    at = found.index + found[0].length;
    style = sgr(style, found[1] ?? "");
  }
  push(text.slice(at));
  return spans;
}

function sgr(style: string[], codes: string): string[] {
  let next = style;
  for (const code of codes === "" ? [0] : codes.split(";").map(Number)) {
    const without = (prefix: string) => next.filter((c) => !c.startsWith(prefix));
    if (code === 0) next = [];
    else if (code === 1) next = [...without("t-b"), "t-bold"];
    else if (code === 22) next = without("t-b");
    else if (code >= 30 && code <= 37) next = [...without("t-f"), `t-f${code - 30}`];
    else if (code >= 90 && code <= 97) next = [...without("t-f"), `t-f${code - 90}`];
    else if (code === 39) next = without("t-f");
    else if (code === 38 || code === 48) break;
  }
  return next;
}

export function money(dollars: number | null | undefined): string {
  if (dollars === null || dollars === undefined) return "\u2013";
  if (dollars === 0) return "$0";
  if (dollars < 0.01) return `$${dollars.toFixed(4)}`;
  return dollars < 100 ? `$${dollars.toFixed(2)}` : `$${Math.round(dollars).toLocaleString("en")}`;
}

export function count(n: number): string {
  if (n < 10_000) return n.toLocaleString("en");
  return n < 1_000_000 ? `${(n / 1000).toFixed(n < 100_000 ? 1 : 0)}k` : `${(n / 1_000_000).toFixed(1)}M`;
}

export function size(bytes: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let n = bytes;
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) {
    n /= 1024;
    unit++;
  }
  return `${unit === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)} ${units[unit]}`;
}

export function duration(ms: number): string {
  if (ms < 1000) return `${Math.max(0, Math.round(ms))} ms`;
  const s = ms / 1000;
  if (s < 60) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  const m = Math.floor(s / 60);
  if (m < 60) return `${m} min ${String(Math.floor(s % 60)).padStart(2, "0")} s`;
  const h = Math.floor(m / 60);
  return h < 48 ? `${h} h ${String(m % 60).padStart(2, "0")} min` : `${Math.floor(h / 24)} days`;
}

export function ago(at: number, now: number): string {
  const s = Math.max(0, (now - at) / 1000);
  if (s < 5) return "now";
  if (s < 60) return `${Math.floor(s)} s ago`;
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  if (s < 86_400) return `${Math.floor(s / 3600)} h ago`;
  return new Date(at).toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" });
}

export function clockTime(at: number): string {
  return new Date(at).toLocaleTimeString("en-GB");
}

export function dateTime(at: number): string {
  return new Date(at).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
}

/** The end of a path or URL, which is what one recognises it by. */
export function repoName(repo: string): string {
  const parts = repo.replace(/\/+$/, "").replace(/\.git$/, "").split("/");
  return line(parts.slice(repo.includes("://") ? -2 : -1).join("/") || repo, 60);
}

/** A model as one says it. */
export function modelName(model: string): string {
  return line(model.startsWith("script:") ? `script:${model.split("/").at(-1)}` : model, 40);
}

/** For a shell: quoted where it has to be. */
export function quoted(text: string): string {
  return /^[A-Za-z0-9_./:@%+=,-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}
