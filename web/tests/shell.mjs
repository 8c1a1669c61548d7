/** A sandbox in the browser: its figures, its files, a shell in it. */

import { assert, scenario } from "./harness.mjs";

await scenario(async (w) => {
  w.commit({ "a.txt": "one\n" });
  await w.serve();
  const page = await w.page();
  await page.getByRole("link", { name: "Sandboxes" }).click();
  await page.getByRole("heading", { name: "No sandboxes" }).waitFor();
  await page.getByRole("button", { name: "New sandbox" }).click();
  await page.waitForURL(/\/sandboxes\/[a-z0-9]+$/);
  const id = page.url().split("/").at(-1);
  await page.getByRole("img", { name: /^CPU: / }).locator("canvas").waitFor();
  await page.getByText("An empty folder.").waitFor();

  // What it used before a page was opened is on the page from its first moment.
  const samples = async () => (await w.api(`/sandboxes/${id}/stats/history`)).samples;
  await w.until(`/sandboxes/${id}/stats/history`, (h) => h.samples.length >= 3);
  const late = await w.page();
  const [history] = await Promise.all([late.waitForResponse((r) => r.url().includes("/stats/history")), late.goto(`${w.url}/sandboxes/${id}`)]);
  const known = (await history.json()).samples.length;
  assert.ok(known >= 3 && known <= (await samples()).length, `${known} samples`);
  await late.getByRole("img", { name: /^CPU: / }).locator("canvas").waitFor();
  await late.clean();
  await late.context().close();
  // The list has the figures of all.
  await page.goto(`${w.url}/sandboxes`);
  await page.getByRole("row", { name: new RegExp(id) }).getByText(/^\d+ %$/).waitFor();
  await page.goto(`${w.url}/sandboxes/${id}`);

  await page.getByRole("tab", { name: "Shell" }).click();
  const shell = page.getByRole("application", { name: `Shell in sandbox ${id}` });
  await shell.locator(".xterm-rows").waitFor();
  // Until the prompt is there; then what it is told is done inside.
  await page.waitForFunction(() => /[$#] ?$/.test(document.querySelector(".xterm-rows")?.textContent?.trimEnd() ?? ""));
  await shell.locator("textarea").focus();
  await page.keyboard.type("printf 'pi%sca\\n' ' <i>x</i> ' | tee 'we ird.txt'; mkdir sub; stty size\n");
  await page.waitForFunction(() => document.querySelector(".xterm-rows")?.textContent?.includes("pi <i>x</i> ca"));
  // The terminal has the size of what one sees.
  await page.waitForFunction(() => /\b[2-9]\d \d{2,3}\b/.test(document.querySelector(".xterm-rows")?.innerText ?? ""));
  // What steers a terminal steers this one, and nothing around it.
  await page.keyboard.type("printf '\\033]0;owned\\007<b>bo'; echo 'ld</b>'\n");
  await page.waitForFunction(() => document.querySelector(".xterm-rows")?.textContent?.includes("<b>bold</b>"));
  assert.match(await page.title(), /Forkyard$/);
  assert.equal(await page.locator("main b").count(), 0);
  await page.keyboard.type("exit 3\n");
  await page.getByText("The shell ended with exit code 3.").waitFor();

  await page.getByRole("tab", { name: "Files" }).click();
  await page.getByRole("link", { name: "sub/" }).waitFor();
  await page.getByRole("link", { name: "we ird.txt" }).click();
  await page.getByText("pi <i>x</i> ca").waitFor();

  page.once("dialog", (d) => d.accept());
  await page.getByRole("button", { name: "Destroy" }).click();
  await page.getByRole("heading", { name: "No sandboxes" }).waitFor();
  await page.clean();
});
