/** The server's API: one function a method, errors with what to do about them. */

import type { Code, ErrorBody, WrongField } from "../api/schema";
import { net, notes, session } from "./state.svelte";

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: Code | "unreachable",
    message: string,
    readonly hint?: string,
    readonly fields: WrongField[] = [],
  ) {
    super(message);
  }
}

const BASE = "/api/v1";

/** For links that the browser itself follows. */
export function address(path: string): string {
  return BASE + path;
}

export async function failure(response: Response): Promise<ApiError> {
  try {
    const { error } = (await response.json()) as ErrorBody;
    return new ApiError(response.status, error.code, error.message, error.hint, error.fields);
  } catch {
    return new ApiError(response.status, "internal", `the server answered ${response.status}`);
  }
}

/** A request; fails only with an ApiError. Tells the rest of the page whether the server can be reached. */
export async function send(path: string, init: RequestInit = {}): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(BASE + path, { credentials: "same-origin", ...init });
  } catch (e) {
    if (init.signal?.aborted) throw e;
    net.lost("the server does not answer");
    throw new ApiError(0, "unreachable", "The server does not answer.", "Is `forkyard serve` running? This page tries again by itself.");
  }
  net.reached();
  if (response.ok) return response;
  const error = await failure(response);
  if (response.status === 401) session.end(error.message);
  throw error;
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await send(path, signal ? { signal } : {})).json();
}

export async function post<T>(path: string, body?: unknown, headers: Record<string, string> = {}): Promise<T> {
  const init: RequestInit = { method: "POST", headers };
  if (body !== undefined) {
    init.headers = { ...headers, "content-type": "application/json" };
    init.body = JSON.stringify(body);
  }
  return (await send(path, init)).json();
}

/** Text of a result or a sandbox's file; null when it is not text. */
export async function bytes(path: string): Promise<Uint8Array> {
  return new Uint8Array(await (await send(path)).arrayBuffer());
}

export function query(values: Record<string, string | number | boolean | null | undefined>): string {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) {
    if (value !== null && value !== undefined && value !== "") search.set(key, String(value));
  }
  const text = search.toString();
  return text ? `?${text}` : "";
}

/** A key that nobody else uses. */
export function uniqueKey(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, "0")).join("");
}

export async function logout() {
  try {
    await send("/session", { method: "DELETE" });
    session.end("You are logged out.");
  } catch (e) {
    notes.fail(e);
  }
}
