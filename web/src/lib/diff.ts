/** Unified diffs, taken apart. Whatever does not look like one is shown as it is. */

export type DiffLine = {
  kind: "same" | "added" | "removed" | "note";
  old: number | null;
  new: number | null;
  text: string;
  /** The part that differs from its counterpart: [from, to). */
  mark: [number, number] | null;
};
export type Hunk = { head: string; lines: DiffLine[] };
export type FileDiff = { path: string; before: string | null; notes: string[]; hunks: Hunk[]; added: number; removed: number };

const HUNK = /^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@ ?(.*)$/;

/** Git puts names with odd bytes into quotes, with octal escapes. */
function unquote(name: string): string {
  if (!name.startsWith('"') || !name.endsWith('"')) return name;
  const bytes: number[] = [];
  const inner = name.slice(1, -1);
  const escapes: Record<string, number> = { n: 10, t: 9, r: 13, a: 7, b: 8, f: 12, v: 11, "\\": 92, '"': 34 };
  for (let i = 0; i < inner.length; i++) {
    if (inner[i] !== "\\") {
      bytes.push(...new TextEncoder().encode(inner[i]!));
      continue;
    }
    const octal = /^[0-3][0-7]{2}/.exec(inner.slice(i + 1));
    if (octal) {
      bytes.push(Number.parseInt(octal[0], 8));
      i += 3;
    } else {
      bytes.push(escapes[inner[i + 1] ?? ""] ?? 63);
      i += 1;
    }
  }
  return new TextDecoder().decode(new Uint8Array(bytes));
}

function side(name: string): string | null {
  const clean = unquote(name.replace(/\t.*$/, ""));
  return clean === "/dev/null" ? null : clean.replace(/^[ab]\//, "");
}

export function parseDiff(patch: string): FileDiff[] {
  const files: FileDiff[] = [];
  let file: FileDiff | null = null;
  let hunk: Hunk | null = null;
  let [old, now, oldLeft, newLeft] = [0, 0, 0, 0];
  const begin = (path: string) => {
    file = { path, before: null, notes: [], hunks: [], added: 0, removed: 0 };
    files.push(file);
    hunk = null;
  };
  for (const text of patch.replace(/\n$/, "").split("\n")) {
    if (hunk && (oldLeft > 0 || newLeft > 0 || text.startsWith("\\"))) {
      const lines: DiffLine[] = (hunk as Hunk).lines;
      const f = file as FileDiff | null;
      const body = text.slice(1);
      if (text.startsWith("+")) {
        lines.push({ kind: "added", old: null, new: now++, text: body, mark: null });
        newLeft--;
        if (f) f.added++;
      } else if (text.startsWith("-")) {
        lines.push({ kind: "removed", old: old++, new: null, text: body, mark: null });
        oldLeft--;
        if (f) f.removed++;
      } else if (text.startsWith("\\")) {
        lines.push({ kind: "note", old: null, new: null, text: text.slice(2), mark: null });
      } else {
        lines.push({ kind: "same", old: old++, new: now++, text: body, mark: null });
        oldLeft--;
        newLeft--;
      }
      continue;
    }
    const head = HUNK.exec(text);
    if (head) {
      if (!file) begin("");
      [old, oldLeft, now, newLeft] = [Number(head[1]), Number(head[2] ?? 1), Number(head[3]), Number(head[4] ?? 1)];
      hunk = { head: head[5] ?? "", lines: [] };
      (file as FileDiff | null)?.hunks.push(hunk);
    } else if (text.startsWith("diff --git ")) {
      begin("");
      const names = /^diff --git ("?a\/.*?"?) ("?b\/.*"?)$/.exec(text);
      if (names && file) (file as FileDiff).path = side(names[2]!) ?? "";
    } else if (text.startsWith("--- ")) {
      if (!file || (file as FileDiff).hunks.length > 0) begin("");
      if (file) (file as FileDiff).before = side(text.slice(4));
    } else if (text.startsWith("+++ ") && file) {
      (file as FileDiff).path = side(text.slice(4)) ?? (file as FileDiff).before ?? "";
    } else if (file && text && !text.startsWith("index ")) (file as FileDiff).notes.push(text);
  }
  for (const f of files) for (const h of f.hunks) markChanges(h.lines);
  return files;
}

/** Lines that replace as many others are compared with them: what is between the common start and end is marked. */
function markChanges(lines: DiffLine[]) {
  for (let i = 0; i < lines.length; ) {
    let removed = i;
    while (lines[removed]?.kind === "removed") removed++;
    let added = removed;
    while (lines[added]?.kind === "added") added++;
    if (removed > i && added - removed === removed - i) {
      for (let k = 0; k < removed - i; k++) markPair(lines[i + k]!, lines[removed + k]!);
    }
    i = Math.max(added, i + 1);
  }
}

function markPair(a: DiffLine, b: DiffLine) {
  let start = 0;
  while (start < a.text.length && start < b.text.length && a.text[start] === b.text[start]) start++;
  let end = 0;
  const most = Math.min(a.text.length, b.text.length) - start;
  while (end < most && a.text.at(-1 - end) === b.text.at(-1 - end)) end++;
  // Lines that have little in common are just different.
  if (start + end < Math.max(a.text.length, b.text.length) / 3) return;
  a.mark = [start, a.text.length - end];
  b.mark = [start, b.text.length - end];
}
