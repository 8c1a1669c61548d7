/**
 * A fork's session as a list of cards: what was said, done and changed. Made from recorded events alone, so the same list
 * can be had for any point of the past. A tool call and its end are one card, and the files it changed are on it.
 */

import type { Event } from "../api/schema";
import { line } from "./text";

export type FileEdit = { path: string; created: boolean; added: number; removed: number; diff: string; cut: boolean };

export type Tool = {
  id: string;
  name: string;
  input: Record<string, unknown>;
  /** Null while it runs. */
  output: string | null;
  error: boolean;
  denied: string | null;
  ms: number | null;
  edits: FileEdit[];
};

type Base = { key: number; at: number; turn: number | null; subagent: string | null };
export type Item = Base &
  (
    | { kind: "said"; text: string; thinking: string; cost: number }
    | { kind: "tool"; tool: Tool }
    | { kind: "task"; text: string }
    | { kind: "message"; from: string; text: string }
    | { kind: "note"; tone: "plain" | "bad" | "good" | "warn"; title: string; text: string }
    | { kind: "system"; title: string; text: string }
  );

type Data = Record<string, any>;

const NANO = 1e-9;

export class Session {
  items: Item[] = [];
  events = 0;
  turns = 0;
  toolCalls = 0;
  cost = 0;
  /** Position of the last event. */
  position = 0;
  #tools = new Map<string, number>();

  /** Items are replaced, never changed: whoever shows one sees that it is new. */
  push(event: Event) {
    this.events++;
    this.position = event.position;
    const d = event.data as Data;
    const item = this.#item(event, d ?? {});
    if (item) this.items.push(item);
  }

  #item(event: Event, d: Data): Item | null {
    const base: Base = { key: event.position, at: event.at, turn: d.turn ?? null, subagent: d.subagent ?? null };
    const note = (tone: "plain" | "bad" | "good" | "warn", title: string, text = ""): Item => ({ ...base, kind: "note", tone, title, text });
    switch (event.type) {
      case "agent.started":
        return note("plain", "Agent started", `in sandbox ${d.sandbox_id}, at most ${d.max_turns} turns`);
      case "agent.resumed":
        return note("warn", `Resumed as attempt ${d.attempt}`, d.message ?? "");
      case "agent.system_message":
        return { ...base, kind: "system", title: "System prompt", text: String(d.text ?? "") };
      case "agent.user_message":
        return { ...base, kind: "task", text: blocks(d.content, "text") };
      case "agent.assistant_message": {
        this.turns = Math.max(this.turns, d.turn ?? 0);
        this.cost += (d.cost ?? 0) * NANO;
        const text = blocks(d.content, "text");
        const thinking = blocks(d.content, "thinking");
        return text || thinking ? { ...base, kind: "said", text, thinking, cost: (d.cost ?? 0) * NANO } : null;
      }
      case "agent.tool_use": {
        this.toolCalls++;
        const id = `${d.subagent ?? ""}/${d.tool_use_id}`;
        const known = this.#tools.get(id);
        // A later attempt takes up the same call.
        if (known !== undefined) return null;
        this.#tools.set(id, this.items.length);
        const tool: Tool = { id, name: String(d.tool), input: d.input ?? {}, output: null, error: false, denied: null, ms: null, edits: [] };
        return { ...base, kind: "tool", tool };
      }
      case "agent.tool_completed": {
        const done = { output: blocks(d.tool_response, "text"), error: !!d.is_error, denied: d.denied_by ? String(d.denied_by) : null, ms: d.duration_ms ?? null };
        const id = `${d.subagent ?? ""}/${d.tool_use_id}`;
        if (this.#change(id, (tool) => ({ ...tool, ...done }))) return null;
        const tool: Tool = { id, name: String(d.tool), input: d.tool_input ?? {}, edits: [], ...done };
        this.#tools.set(id, this.items.length);
        return { ...base, kind: "tool", tool };
      }
      case "agent.file_edited": {
        const edit: FileEdit = {
          path: String(d.file_path),
          created: d.change_type === "created",
          added: d.lines_added ?? 0,
          removed: d.lines_removed ?? 0,
          diff: String(d.full_diff ?? d.diff_preview ?? ""),
          cut: !d.full_diff && d.full_diff_available === false ? false : !d.full_diff,
        };
        const id = `${d.subagent ?? ""}/${d.tool_use_id}`;
        if (this.#change(id, (tool) => ({ ...tool, edits: [...tool.edits, edit] }))) return null;
        const tool: Tool = { id, name: "Edit", input: { file_path: d.file_path }, output: "", error: false, denied: null, ms: null, edits: [edit] };
        return { ...base, kind: "tool", tool };
      }
      case "agent.message_injected":
        return { ...base, kind: "message", from: String(d.kind ?? "user_message"), text: String(d.content ?? "") };
      case "agent.interrupted":
        return note("warn", "Interrupted");
      case "agent.compacted":
        return { ...base, kind: "system", title: "Conversation was summarised", text: String(d.summary ?? "") };
      case "agent.checkpoint_created":
        return note("plain", "Checkpoint", `${d.checkpoint?.kind ?? ""} ${d.checkpoint?.id ?? ""}`.trim());
      case "agent.subagent_invoked":
        return note("plain", "Subagent", String(d.description ?? d.prompt ?? ""));
      case "agent.subagent_completed":
        return note(d.success ? "good" : "warn", "Subagent ended", `${d.turns} turns`);
      case "agent.skill_invoked":
        return note("plain", "Skill", String(d.skill ?? ""));
      case "agent.error":
      case "agent.stream_error":
        return note("bad", "Error", String(d.error ?? ""));
      case "agent.waiting":
        return note("plain", "Waiting for messages", "The task is done; the agent stays for a while.");
      case "agent.completed":
        return note("good", "Agent finished", `${d.turns} turns, ${d.tool_calls} tool calls`);
      case "agent.failed":
        return note("bad", "Agent ended without finishing", String(d.stop_reason ?? ""));
      case "agent.shutdown":
        return note("warn", "Agent was shut down", String(d.reason ?? ""));
      case "fork.task_started":
        return TASKS[d.task?.task] ? note("plain", TASKS[d.task.task]!) : null;
      case "fork.task_failed":
        return note("bad", "A step failed", String(d.error?.message ?? ""));
      case "fork.sandbox_lost":
        return note("warn", "The sandbox was lost", "The agent goes on from its last checkpoint in a new one.");
      case "fork.taken_over":
        return note("warn", `Taken over as attempt ${d.attempt}`);
      case "fork.timed_out":
        return note("bad", "Its time is over");
      case "fork.gave_up":
        return note("bad", "Given up", String(d.error?.message ?? ""));
      case "fork.ended":
        return note(d.result?.outcome === "success" ? "good" : "warn", `Ended: ${String(d.result?.outcome ?? "").replace("_", " ")}`, d.result?.error ?? "");
      default:
        return null;
    }
  }

  #change(id: string, how: (tool: Tool) => Tool): boolean {
    const at = this.#tools.get(id);
    const item = at === undefined ? undefined : this.items[at];
    if (at === undefined || item?.kind !== "tool") return false;
    this.items[at] = { ...item, tool: how(item.tool) };
    return true;
  }
}

const TASKS: Record<string, string> = {
  create_sandbox: "Sandbox is made",
  collect: "Work is collected",
  verify: "Result is verified",
  publish: "Result is published",
};

function blocks(content: unknown, kind: "text" | "thinking"): string {
  if (!Array.isArray(content)) return "";
  const parts = content.filter((b: Data) => b?.type === kind).map((b: Data) => String(b.text ?? b.thinking ?? ""));
  return parts.join("\n\n");
}

/** A tool call in one line. */
export function toolLine(name: string, input: Record<string, unknown>): string {
  const first = input.command ?? input.file_path ?? input.pattern ?? input.description ?? input.skill ?? input.path;
  if (typeof first === "string") return line(first.replace(/^\/workspace\//, ""), 160);
  const text = JSON.stringify(input);
  return text === "{}" ? "" : line(text, 160);
}

/** What an event says about what a fork does now. */
export function doing(event: Event): string | null {
  const d = (event.data ?? {}) as Data;
  switch (event.type) {
    case "agent.tool_use":
      return `${line(String(d.tool), 30)}  ${toolLine(String(d.tool), d.input ?? {})}`;
    case "agent.assistant_message":
      return line(blocks(d.content, "text"), 160) || null;
    case "agent.message_injected":
      return `Message: ${line(String(d.content ?? ""), 120)}`;
    case "agent.waiting":
      return "Waits for messages";
    case "agent.interrupted":
      return "Interrupted";
    case "fork.task_started":
      return TASKS[d.task?.task] ?? null;
    case "fork.ended":
      return line(String(d.result?.report?.final_response ?? d.result?.error ?? ""), 160) || null;
    default:
      return null;
  }
}
