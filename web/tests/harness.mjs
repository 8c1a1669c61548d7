/**
 * A real server with scripted models, and a real Chromium. Each scenario is a program of its own that ends with status 0,
 * or says what it saw. Whatever the page says on the console, and every breach of its policy, fails a scenario.
 */

import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

export { assert };

/** Long enough for a loaded machine. */
export const PATIENCE = 60_000;
const BIN = process.env.FORKYARD_BIN;
const CHROMIUM = process.env.FORKYARD_CHROMIUM ?? "/usr/bin/chromium";
export const FULL = process.env.FORKYARD_TEST_SCALE === "full";

export class World {
  constructor() {
    this.dir = mkdtempSync(join(tmpdir(), "forkyard-web-"));
    this.home = join(this.dir, "home");
    this.repo = join(this.dir, "repo");
    mkdirSync(this.repo);
    mkdirSync(this.home);
    this.pages = [];
  }

  /** Files of the repository, committed. */
  commit(files, branch = "main") {
    for (const [name, text] of Object.entries(files)) {
      const path = join(this.repo, name);
      mkdirSync(join(path, ".."), { recursive: true });
      writeFileSync(path, text);
    }
    const git = (...args) =>
      execFileSync("git", ["-c", "user.name=t", "-c", "user.email=t@localhost", ...args], { cwd: this.repo, stdio: "pipe" });
    git("init", "-q", "-b", branch);
    git("add", "-A");
    git("commit", "-q", "-m", "first");
  }

  /** A model that answers from this script. */
  model(name, script) {
    const path = join(this.dir, `${name}.toml`);
    writeFileSync(path, script);
    return `script:${path}`;
  }

  /** Without work, nobody drives a run: it costs nothing and stays as it is. */
  async serve(port = 0, { work = true } = {}) {
    this.works = work;
    this.server = spawn(BIN, ["serve", "--json", "--root", this.dir, "--port", String(port), ...(work ? [] : ["--no-work"])], {
      env: { PATH: process.env.PATH, FORKYARD_HOME: this.home, HOME: this.dir },
      cwd: this.dir,
      stdio: ["ignore", "pipe", "inherit"],
    });
    const lines = createInterface({ input: this.server.stdout });
    const [line] = await new Promise((done, fail) => {
      lines.once("line", (l) => done([l]));
      this.server.once("exit", (code) => fail(new Error(`serve ended with ${code}`)));
    });
    const said = JSON.parse(line);
    this.url = said.url;
    this.login = said.login;
    this.port = Number(new URL(said.url).port);
    this.token = readFileSync(said.token_file, "utf8").trim();
  }

  /** As a crash does it. */
  async kill() {
    const ended = new Promise((done) => this.server.once("exit", done));
    this.server.kill("SIGKILL");
    await ended;
  }

  async api(path, body, method = body === undefined ? "GET" : "POST") {
    const response = await fetch(`${this.url}/api/v1${path}`, {
      method,
      headers: { authorization: `Bearer ${this.token}`, ...(body === undefined ? {} : { "content-type": "application/json" }) },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    const text = await response.text();
    assert.ok(response.ok, `${method} ${path}: ${response.status} ${text}`);
    return text ? JSON.parse(text) : null;
  }

  run(model, more = {}) {
    return this.api("/runs", { repo: this.repo, prompt: "Do the task.", model, forks: 1, sandbox: { network: "none" }, ...more });
  }

  async until(path, holds, what = path) {
    const since = Date.now();
    for (;;) {
      const answer = await this.api(path);
      if (holds(answer)) return answer;
      assert.ok(Date.now() - since < PATIENCE, `${what}: ${JSON.stringify(answer).slice(0, 2000)}`);
      await new Promise((done) => setTimeout(done, 100));
    }
  }
  ended(id) {
    return this.until(`/runs/${id}`, (r) => r.status === "ended");
  }

  async browser() {
    this.chromium = await chromium.launch({
      executablePath: CHROMIUM,
      args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"],
    });
  }

  /** A page that is logged in by the link, and notes what it should not say. */
  async page(options = {}) {
    if (!this.chromium) await this.browser();
    const context = await this.chromium.newContext({ viewport: { width: 1440, height: 900 }, ...options });
    context.setDefaultTimeout(PATIENCE);
    const page = await context.newPage();
    const faults = [];
    /** Errors of the network that a scenario causes itself. */
    page.expected = [];
    page.on("console", (message) => {
      const text = message.text();
      if (["error", "warning"].includes(message.type()) && !page.expected.some((e) => e.test(text))) faults.push(`${message.type()}: ${text} ${message.location().url}`);
    });
    page.on("pageerror", (e) => faults.push(`exception: ${e.stack}`));
    page.on("request", (request) => {
      const url = new URL(request.url());
      if (url.origin !== this.url && !["data:", "blob:"].includes(url.protocol)) faults.push(`a request to ${request.url()}`);
    });
    await page.addInitScript(() => {
      globalThis.breaches = [];
      document.addEventListener("securitypolicyviolation", (e) => globalThis.breaches.push(`${e.violatedDirective} ${e.blockedURI} ${e.sourceFile}`));
    });
    page.faults = async () => [...faults, ...(await page.evaluate(() => globalThis.breaches))];
    page.clean = async () => assert.deepEqual(await page.faults(), []);
    const link = await this.api("/login-links", null, "POST");
    await page.goto(this.url + link.path);
    this.pages.push(page);
    return page;
  }

  /** For whoever reads of a failure: what was on the pages, and what the server knew. */
  async shown() {
    for (const page of this.pages) {
      const text = await page.locator("main").innerText({ timeout: 1000 }).catch((e) => String(e));
      console.error(`${page.url()}\n${text.slice(0, 2000)}\n`);
    }
    const live = await this.api("/runs?live=true").catch(() => ({ runs: [] }));
    for (const { id } of live.runs) console.error(JSON.stringify(await this.api(`/runs/${id}/forks`).catch(String)).slice(0, 2000));
  }

  async end() {
    await this.chromium?.close();
    if (this.server?.exitCode === null) {
      // Sandboxes outlive a server: that is what they are for.
      for (const run of this.works ? (await this.api("/runs?live=true")).runs : []) {
        await this.api(`/runs/${run.id}/cancel`, null, "POST");
        await this.ended(run.id);
      }
      for (const { id } of (await this.api("/sandboxes?limit=500")).sandboxes) await this.api(`/sandboxes/${id}`, undefined, "DELETE");
      const ended = new Promise((done) => this.server.once("exit", done));
      this.server.kill("SIGTERM");
      await ended;
    }
    rmSync(this.dir, { recursive: true, force: true });
  }
}

/** Runs a scenario and leaves nothing behind; its faults are on standard error. */
export async function scenario(work) {
  const world = new World();
  let failed = null;
  try {
    await work(world);
  } catch (e) {
    failed = e;
    await world.shown();
  }
  await world.end();
  if (failed) {
    console.error(failed);
    process.exit(1);
  }
}
