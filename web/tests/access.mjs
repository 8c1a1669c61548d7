/** Who may, by which means, and for whom: login, scopes, the keyboard, screen readers, small screens, both themes. */

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { assert, scenario } from "./harness.mjs";

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const MODEL = `
name = "small"
price_as = "sonnet"
[[turn]]
when = { fork = 0 }
text = "I write."
tools = [{ name = "Write", input = { file_path = "a.txt", content = "two\\n" } }, { name = "Bash", input = { command = "echo hi; false" } }]
[[turn]]
text = "Done."
`;
const WAITS = `
name = "waits"
[[turn]]
text = "I wait."
tools = [{ name = "Bash", input = { command = "sleep 600" } }]
`;

async function sound(page, where) {
  const { violations } = await page.evaluate(`${axe}; axe.run(document, { resultTypes: ["violations"] })`);
  const bad = violations.filter((v) => ["serious", "critical"].includes(v.impact));
  assert.deepEqual(bad.map((v) => `${v.id}: ${v.help}: ${v.nodes.map((n) => `${n.html.slice(0, 160)} ${n.failureSummary}`).join(" | ")}`), [], where);
}

await scenario(async (w) => {
  w.commit({ "a.txt": "one\n" });
  await w.serve();
  const done = await w.run(w.model("small", MODEL), { forks: 2, verify: "grep -q two a.txt" });
  await w.ended(done.id);
  const live = await w.run(w.model("waits", WAITS), { forks: 1, budget_usd: 1 });
  const box = await w.api("/sandboxes", {});
  await w.until(`/runs/${live.id}/events?types=agent.tool_use`, (e) => e.events.length === 1);

  // Without a session there is the login page, and nothing else; a link works once.
  await w.browser();
  const stranger = await (await w.chromium.newContext()).newPage();
  await stranger.goto(`${w.url}/runs/${done.id}`);
  await stranger.getByRole("heading", { name: "Log in" }).waitFor();
  const { path } = await w.api("/login-links", null, "POST");
  const used = await (await w.chromium.newContext()).newPage();
  await used.goto(w.url + path);
  await used.getByRole("heading", { name: "Runs" }).waitFor();
  await stranger.goto(w.url + path);
  await stranger.getByText("This login link was used before").waitFor();
  // A token does it, too, and is not kept.
  await stranger.getByLabel("Or paste a token").fill(`${w.token}x`);
  await stranger.getByRole("button", { name: "Log in" }).click();
  await stranger.getByRole("alert").waitFor();
  await stranger.getByLabel("Or paste a token").fill(w.token);
  await stranger.getByRole("button", { name: "Log in" }).click();
  await stranger.getByRole("heading", { name: "Runs" }).waitFor();
  assert.equal(await stranger.evaluate(() => document.cookie + JSON.stringify({ ...localStorage, ...sessionStorage })), "{}");
  await stranger.getByRole("button", { name: "Log out" }).click();
  await stranger.getByText("You are logged out.").waitFor();
  // Who may only read sees everything and steers nothing.
  const reader = await w.api("/tokens", { name: "reader", scope: "read" });
  await stranger.getByLabel("Or paste a token").fill(reader.token);
  await stranger.getByRole("button", { name: "Log in" }).click();
  await stranger.getByRole("heading", { name: "Runs" }).waitFor();
  await stranger.goto(`${w.url}/runs/${live.id}/forks/0`);
  await stranger.getByRole("feed", { name: "Activity" }).getByText("I wait.").waitFor();
  assert.equal(await stranger.getByRole("button", { name: /Send|Interrupt|Cancel/ }).count(), 0);

  const views = {
    runs: "/",
    run: `/runs/${done.id}`,
    timeline: `/runs/${done.id}?tab=timeline`,
    files: `/runs/${done.id}?tab=files`,
    prompt: `/runs/${done.id}?tab=prompt`,
    "nothing found": "/?q=nothing-has-this",
    live: `/runs/${live.id}`,
    fork: `/runs/${done.id}/forks/0`,
    changes: `/runs/${done.id}/forks/0?tab=changes`,
    terminal: `/runs/${done.id}/forks/0?tab=terminal`,
    "live fork": `/runs/${live.id}/forks/0`,
    details: `/runs/${live.id}/forks/0?tab=details`,
    "past": `/runs/${done.id}/forks/0?at=5`,
    "nothing to compare": `/runs/${live.id}/compare`,
    compare: `/runs/${done.id}/compare?forks=0,1`,
    sandboxes: "/sandboxes",
    sandbox: `/sandboxes/${box.id}`,
    shell: `/sandboxes/${box.id}?tab=shell`,
    new: "/new",
    health: "/health",
    nowhere: "/runs/a/b/c",
  };
  for (const [theme, viewport] of [["light", { width: 1440, height: 900 }], ["dark", { width: 390, height: 844 }]]) {
    const page = await w.page({ viewport, colorScheme: theme });
    for (const [name, path] of Object.entries(views)) {
      await page.goto(w.url + path);
      await page.locator("h1").first().waitFor();
      await page.waitForTimeout(300);
      await sound(page, `${name}, ${theme}`);
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
      assert.ok(wide <= 0, `${name} is ${wide} px wider than a ${viewport.width} px screen`);
    }
    // What stands over a page.
    await page.goto(`${w.url}/runs/${live.id}`);
    await page.getByRole("button", { name: "Add forks" }).click();
    await page.getByRole("dialog", { name: "Add forks" }).waitFor();
    await sound(page, `add forks, ${theme}`);
    await page.keyboard.press("Escape");
    await page.keyboard.press("?");
    await page.getByRole("dialog", { name: "Keyboard" }).waitFor();
    await sound(page, `keys, ${theme}`);
    await page.clean();
  }
  await stranger.goto(`${w.url}/`);
  await stranger.getByRole("button", { name: "Log out" }).click();
  await stranger.getByRole("heading", { name: "Log in" }).waitFor();
  await sound(stranger, "login");

  // By keyboard alone: to a run, to its fork, to the next one, to the help and back.
  const page = await w.page();
  await page.getByRole("heading", { name: "Runs" }).waitFor();
  await page.getByRole("row").nth(2).waitFor();
  await page.keyboard.press("/");
  await page.keyboard.type(done.id);
  await page.getByRole("row").nth(2).waitFor({ state: "detached" });
  await page.keyboard.press("Escape");
  await page.keyboard.press("j");
  await page.keyboard.press("Enter");
  await page.waitForURL(`**/runs/${done.id}`);
  // Another page is begun at its beginning, and said.
  await page.waitForFunction(() => document.activeElement?.id === "main");
  await page.locator("[aria-live=polite]", { hasText: /Do the task.* · Forkyard/ }).first().waitFor({ state: "attached" });
  await page.getByRole("link", { name: "Fork 0" }).first().waitFor();
  await page.locator("#tab-forks").focus();
  for (const [key, tab] of [["ArrowRight", "Timeline"], ["End", "Prompt"], ["ArrowRight", "Forks"], ["ArrowLeft", "Prompt"], ["Home", "Forks"]]) {
    await page.keyboard.press(key);
    await page.waitForFunction((name) => document.activeElement?.getAttribute("role") === "tab" && document.activeElement.textContent.trim().startsWith(name), tab);
  }
  await page.keyboard.press("j");
  await page.keyboard.press("Enter");
  await page.waitForURL("**/forks/0");
  await page.getByRole("button", { name: "Next fork" }).waitFor();
  await page.keyboard.press("]");
  await page.waitForURL("**/forks/1");
  await page.getByRole("feed").getByText("Done.").waitFor();
  await page.keyboard.press("j");
  await page.waitForFunction(() => document.activeElement?.getAttribute("role") === "article");
  await page.keyboard.press("[");
  await page.waitForURL("**/forks/0");
  // To the command that failed, unfolded and folded again; then the same in the terminal, and the files of its changes.
  await page.getByRole("feed").getByText("echo hi; false").waitFor();
  const folded = page.getByRole("article").filter({ hasText: "echo hi; false" }).getByRole("button").first();
  for (let i = 0; i < 30 && !(await folded.evaluate((b) => b.closest("[role=article]") === document.activeElement)); i++) await page.keyboard.press("j");
  await page.keyboard.press("o");
  await page.waitForFunction(() => document.activeElement?.querySelector("[aria-expanded=true]"));
  await page.keyboard.press("o");
  await page.waitForFunction(() => document.activeElement?.querySelector("[aria-expanded=false]"));
  await page.getByRole("tab", { name: "Terminal" }).click();
  await page.keyboard.press("j");
  await page.waitForFunction(() => document.activeElement?.getAttribute("role") === "article");
  await page.getByRole("tab", { name: "Changes" }).click();
  await page.getByRole("region", { name: "Changes of a.txt" }).waitFor();
  await page.keyboard.press("j");
  await page.waitForFunction(() => document.activeElement?.tagName === "SUMMARY");
  // The slider by its own keys; where it stands is in the address, and the address leads there.
  await page.getByRole("slider", { name: "Point of the session" }).focus();
  await page.keyboard.press("Home");
  await page.waitForURL(/[?&]at=0/);
  await page.keyboard.press("ArrowRight");
  await page.waitForURL(/[?&]at=1/);
  await page.goto(`${w.url}/runs/${done.id}/forks/0?at=3`);
  await page.waitForFunction(() => document.querySelector("input[type=range]")?.value === "3");
  // A link to an event of a tool leads to its card.
  await page.goto(`${w.url}/runs/${done.id}/forks/0`);
  const link = await page.getByRole("article").filter({ hasText: "echo hi; false" }).getByRole("link").getAttribute("href");
  await page.goto("about:blank");
  await page.goto(`${w.url}/runs/${done.id}/forks/0${link}`);
  await page.waitForFunction(() => document.activeElement?.textContent?.includes("echo hi; false"));
  // What is compared, which file, and what is taken.
  await page.goto(`${w.url}/runs/${done.id}/compare?forks=0,1&file=a.txt&take=1`);
  await page.getByText(`forkyard apply ${done.id}/1`).waitFor();
  assert.equal(await page.getByRole("combobox", { name: "Fork to take" }).inputValue(), "1");
  await page.goto(`${w.url}/new?prompt=Do%20it&repo=%2Ftmp%2Fx&forks=7`);
  await page.getByText("forkyard fork /tmp/x -p 'Do it' -f 7").waitFor();
  // The shell takes every key but one.
  await page.goto(`${w.url}/sandboxes/${box.id}?tab=shell`);
  await page.waitForFunction(() => document.activeElement?.closest(".xterm"));
  await page.keyboard.press("Tab");
  await page.waitForFunction(() => document.activeElement?.closest(".xterm"));
  await page.keyboard.press("F6");
  await page.waitForFunction(() => document.activeElement?.id === "tab-shell");
  // Nothing yet is said, not shown as nothing.
  for (const [at, words] of [["compare", "No fork has a result yet"], ["?tab=files", "as soon as the first fork's work is collected"], ["forks/0?tab=changes", /No |nothing|yet/i]]) {
    await page.goto(`${w.url}/runs/${live.id}${at.startsWith("?") ? at : `/${at}`}`);
    await page.getByText(words).first().waitFor();
  }
  await page.keyboard.press("?");
  await page.getByRole("dialog", { name: "Keyboard" }).waitFor();
  await page.keyboard.press("Escape");
  await page.keyboard.press("g");
  await page.keyboard.press("h");
  await page.getByRole("heading", { name: "Health" }).waitFor();
  await page.getByText("Runs will work here").waitFor();
  const { version } = await w.api("/about");
  await page.locator("dl div", { hasText: "Version" }).getByText(version).waitFor();
  await page.locator("dl div", { hasText: "Forks" }).getByText(/at most \d+, \d+ at once/).waitFor();
  await page.keyboard.press("t");
  assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "light");
  await page.clean();
});
