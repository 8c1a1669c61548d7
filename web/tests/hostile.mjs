/**
 * Markup, script, terminal codes and characters that turn text around, in every place that shows what a repository, an
 * agent or a model wrote: all of it is text.
 */

import { assert, PATIENCE, scenario } from "./harness.mjs";

const TAG = `<img src=x onerror="globalThis.pwned=1"><script>globalThis.pwned=1</script>`;
const STEER = `\u001b]0;owned\u0007\u001b[2J\u202e`;
/** What is seen of it. */
const SHOWN = `<img src=x onerror="globalThis.pwned=1"><script>globalThis.pwned=1</script>`;
const STEERED = /␛\]0;owned␇␛\[2J⟨U\+202E⟩/;
const file = `<img src=x onerror=pwned()> b.txt`;
const branch = `x-<b>bold`;
/** A file that judges, with a name that is markup. */
const test = `tests/<img src=x onerror=pwned()>.sh`;

const toml = (text) => JSON.stringify(text).replaceAll("\u202e", "\\u202e").replaceAll("\u007f", "\\u007f");
const MODEL = `
name = ${toml(TAG)}
[[turn]]
text = ${toml(`model ${TAG}${STEER}`)}
thinking = ${toml(`thought ${TAG}`)}
tools = [
  { name = "Write", input = { file_path = ${toml(file)}, content = ${toml(`content ${TAG}\n${STEER}\n`)} } },
  { name = "Write", input = { file_path = ${toml(test)}, content = "true\\n" } },
  { name = "Bash", input = { command = ${toml(`printf '%s' '${TAG}'; printf '\\033]0;owned\\007\\033[2J\\342\\200\\256'; exit 1`)} } },
  { name = ${toml(`Nope${TAG}`)}, input = { ${toml(TAG)} = ${toml(TAG)} } },
]
[[turn]]
text = ${toml(`last ${TAG}${STEER}`)}
[[turn]]
when = { message = "message" }
repeat = true
text = ${toml(`live ${TAG}${STEER} and many words after it so that one can read it while it is being written`)}
word_ms = 300
`;

await scenario(async (w) => {
  w.commit({ [file]: `old ${TAG}\n`, [test]: "false\n" }, branch);
  const model = w.model("hostile", MODEL);
  await w.serve();
  const prompt = `prompt ${TAG}${STEER}`;
  const { id } = await w.run(model, { prompt, forks: 2, branch, linger_ms: 600_000, variants: [{ name: `name ${TAG}` }, {}], verify: `printf '%s' '${TAG}'; printf '\\033[31mred\\033[2J'; false` });
  const page = await w.page();
  const calm = async (place) => {
    assert.equal(await page.evaluate(() => globalThis.pwned), undefined, place);
    assert.equal(await page.locator("main img, main script, main b").count(), 0, place);
    assert.match(await page.title(), /Forkyard$/, place);
  };
  const shows = async (place, locator, ...wanted) => {
    await locator.first().waitFor();
    // It may still be on its way.
    for (const since = Date.now(); ; await page.waitForTimeout(100)) {
      const text = (await locator.allInnerTexts()).join("\n");
      const missing = wanted.filter((w) => !(w instanceof RegExp ? w.test(text) : text.includes(w)));
      if (missing.length === 0) break;
      assert.ok(Date.now() - since < PATIENCE, `${place}: ${missing.join(", ")} in ${text.slice(0, 1500)}`);
    }
    await calm(place);
  };
  const main = page.locator("main");

  await page.goto(`${w.url}/?q=prompt`);
  await shows("runs", page.getByRole("row").nth(1), `prompt ${SHOWN}`, STEERED, branch);
  await page.goto(`${w.url}/?q=${encodeURIComponent(TAG)}`);
  await shows("search from the address", main, "prompt");
  assert.equal(await page.getByRole("searchbox").inputValue(), TAG);

  await page.goto(`${w.url}/runs/${id}`);
  await shows("run", page.getByRole("heading", { level: 1 }), `prompt ${SHOWN}`, STEERED);
  await shows("branch", page.locator(".facts"), branch);
  await page.getByRole("listitem").getByText("Waits for messages").first().waitFor();
  await shows("fork card", page.getByRole("listitem").first(), `name ${SHOWN.slice(0, 30)}`);
  await page.goto(`${w.url}/runs/${id}?tab=prompt`);
  await shows("prompt", page.getByRole("tabpanel"), `prompt ${SHOWN}`, STEERED);

  await page.goto(`${w.url}/runs/${id}/forks/0`);
  const feed = page.getByRole("feed", { name: "Activity" });
  await feed.getByText(/^last /).waitFor();
  await page.getByText("Thinking").click();
  await shows("model text", feed.locator(".prose"), `model ${SHOWN}`, `last ${SHOWN}`, STEERED);
  await shows("thinking", feed.locator(".thinking pre"), `thought ${SHOWN}`);
  await shows("file change card", feed.locator(".edit"), file, `content ${SHOWN}`, STEERED);
  await shows("tool output", feed.locator(".out"), SHOWN, STEERED);
  await shows("tool call", feed.locator(".tool-head"), SHOWN);
  await feed.locator(".tool-head").first().click();
  await shows("tool input", feed.locator(".block"), file);
  await page.goto(`${w.url}/runs/${id}/forks/0?tab=terminal`);
  await shows("terminal", page.getByRole("feed", { name: "Terminal" }), SHOWN, STEERED);

  // A message goes in as it is and is seen as it is; the server strips what steers a terminal.
  await page.goto(`${w.url}/runs/${id}/forks/0`);
  await page.getByRole("textbox", { name: "Message to the agent" }).fill(`message ${TAG}`);
  await page.getByRole("button", { name: "Send" }).click();
  await shows("words while they are written", page.getByRole("log", { name: "What the agent says right now" }), `live ${SHOWN}`, STEERED);
  await shows("message", feed.locator(".is-message"), `message ${SHOWN}`);
  await feed.getByText(/^live /).waitFor();
  const details = page.getByRole("complementary", { name: "Details" });
  await details.getByRole("button", { name: "Ask" }).click();
  await shows("git", details.locator("pre"), file);
  await shows("base of the fork", details, branch);
  await page.goto(`${w.url}/runs/${id}`);
  await page.getByRole("listitem").first().waitFor();
  await w.api(`/runs/${id}/forks/0/messages`, { content: "another message" });
  await shows("what a fork does", page.getByRole("listitem").first(), `live ${SHOWN.slice(0, 60)}`);

  const { sandbox_id } = await w.api(`/runs/${id}/forks/1`);
  await w.api(`/sandboxes/${sandbox_id}/exec`, { command: ["ln", "-s", "<b>target</b>", "/workspace/link"] });
  await page.goto(`${w.url}/sandboxes/${sandbox_id}`);
  await shows("file names", page.getByRole("row"), file);
  await shows("where links lead", page.getByRole("row"), "<b>target</b>");
  await page.getByRole("link", { name: file }).click();
  await shows("file content", main.locator(".text"), `content ${SHOWN}`, STEERED);
  await page.goto(`${w.url}/sandboxes`);
  await shows("sandboxes", page.getByRole("row").nth(1), id);

  await w.api(`/runs/${id}/cancel`, null, "POST");
  await w.ended(id);
  await page.goto(`${w.url}/runs/${id}/forks/0?tab=changes`);
  await shows("diff", page.getByRole("tabpanel"), file, `content ${SHOWN}`, STEERED, `old ${SHOWN}`);
  await page.goto(`${w.url}/runs/${id}?tab=files`);
  await shows("matrix", page.getByRole("tabpanel").getByRole("table"), file);
  await page.goto(`${w.url}/runs/${id}/compare`);
  await shows("compare", page.getByRole("region", { name: /^Fork 0: </ }), `content ${SHOWN}`, STEERED);
  await page.getByRole("button", { name: "Show the patch" }).click();
  await shows("patch", page.getByTestId("patch"), SHOWN, STEERED);

  // Verify's own output, of a run that is judged, and the tests that were edited.
  const judged = await w.run(model, { prompt, branch, forks: 2, verify: `printf '%s' '${TAG}'; printf '\\033[31mred\\033[2J'; false` });
  await w.ended(judged.id);
  await page.goto(`${w.url}/runs/${judged.id}/compare`);
  await shows("verify", page.locator("section").filter({ hasText: "verify" }).first(), SHOWN, "red␛[2J");
  await shows("edited tests", page.locator(".tests").first(), test);
  await page.goto(`${w.url}/runs/${judged.id}`);
  await shows("ranking", page.locator("section").filter({ has: page.getByRole("heading", { name: "Ranking" }) }), test);
  await page.goto(`${w.url}/runs/${judged.id}/forks/0`);
  await shows("verify of a fork", details.locator("section").filter({ hasText: "Verify" }), SHOWN);

  // What a run failed by.
  const failed = await w.run(model, { prompt: "fails", setup: `printf '%s' '${TAG}' >&2; printf '\\033[2J' >&2; exit 1` });
  await w.ended(failed.id);
  await page.goto(`${w.url}/runs/${failed.id}`);
  await shows("error of a run", page.getByRole("alert"), SHOWN);
  await page.goto(`${w.url}/?q=fails`);
  await shows("error in the list", page.locator(".why"), SHOWN.slice(0, 40));

  // Errors of the API name what was asked for.
  page.expected.push(/status of 4\d\d/);
  await page.goto(`${w.url}/runs/${encodeURIComponent(TAG)}`);
  await shows("error", page.getByRole("alert"), "there is no run");
  const box = await w.api("/sandboxes", {});
  await page.goto(`${w.url}/sandboxes/${box.id}?path=${encodeURIComponent(`/${file}`)}`);
  await shows("path from the address", main.locator(".crumbs").last(), file);
  await page.goto(`${w.url}/new?prompt=${encodeURIComponent(TAG)}`);
  await shows("form from the address", page.locator(".command"), TAG);
  await page.goto(`${w.url}/new`);
  await page.getByLabel("Repository").fill(`ext::${TAG}`);
  await page.getByLabel("Prompt", { exact: true }).fill("x");
  await page.getByRole("button", { name: /^Start/ }).click();
  await shows("error of a field", page.getByRole("alert"), "repo");
  await shows("command", page.locator(".command"), TAG);
  await page.clean();
});
