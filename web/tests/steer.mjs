/** The way of a user: a run from the form, watched, steered, compared, its result taken, its session played again. */

import { assert, scenario } from "./harness.mjs";

// Fork 0 waits for a message and obeys it; fork 1 is done at once.
const MODEL = `
name = "steered"
price_as = "sonnet"
[[turn]]
when = { fork = 1 }
text = "I write it down."
tools = [{ name = "Write", input = { file_path = "notes.txt", content = "one\\ntwo\\n" } }]
[[turn]]
when = { fork = 1 }
text = "Fork one is done."
[[turn]]
text = "I look around first, word by word."
word_ms = 30
tools = [{ name = "Edit", input = { file_path = "notes.txt", old_string = "one", new_string = "uno" } }]
[[turn]]
text = "I wait."
tools = [{ name = "Bash", input = { command = "printf '\\\\033[31mred\\\\033[0m\\\\n'; while ! [ -e /tmp/go ]; do sleep 0.1; done" } }]
[[turn]]
when = { message = "Say banana" }
text = "You asked for it: banana. I say so slowly, one word after the other, so that one can read along while I write it down."
word_ms = 150
tools = [{ name = "Bash", input = { command = "echo banana >> notes.txt; sleep 600" } }]
[[turn]]
when = { message = "Stop that" }
text = "I stopped, and finish."
`;

await scenario(async (w) => {
  w.commit({ "notes.txt": "one\n" });
  const model = w.model("steered", MODEL);
  await w.serve();
  const page = await w.page();

  // Somebody else looks at the list all the while, and never asks for it again.
  const list = await w.page();
  const row = list.locator("tbody tr").first();
  const loads = [];
  list.on("request", (request) => {
    if (/\/api\/v1\/runs\?.*limit=100/.test(request.url())) loads.push(request.url());
  });
  await list.getByRole("heading", { name: "No runs yet" }).waitFor();
  loads.length = 0;

  // Nothing is here yet, and the page says what to do.
  await page.getByRole("heading", { name: "No runs yet" }).waitFor();
  await page.getByRole("link", { name: "Start the first run" }).click();

  // What the API refuses is said beside the field, with the fix.
  await page.getByLabel("Repository").fill("/etc");
  await page.getByLabel("Prompt", { exact: true }).fill("Write <b>notes</b> in 'two' ways");
  await page.getByLabel("Forks", { exact: true }).fill("2");
  await page.getByLabel("Model", { exact: true }).fill(model);
  page.expected.push(/status of 4\d\d/);
  await page.getByRole("button", { name: "Start 2 forks" }).click();
  await page.getByRole("alert").filter({ hasText: "path_refused" }).waitFor();
  assert.match(await page.getByRole("alert").innerText(), /What helps: .*server\.root/);
  page.expected.pop();

  await page.getByLabel("Repository").fill(w.repo);
  await page.getByLabel("Verify").fill("grep -q two notes.txt");
  await page.getByLabel("Budget, in dollars").fill("5");
  await page.getByText("More", { exact: true }).click();
  await page.getByLabel("Network").selectOption("none");
  const command = await page.locator(".command pre").innerText();
  assert.ok(command.includes(`-p 'Write <b>notes</b> in '\\''two'\\'' ways' -f 2`), command);
  assert.ok(command.includes("--verify 'grep -q two notes.txt' --budget 5 --network none"), command);
  await page.getByRole("button", { name: "Start 2 forks" }).click();

  // Live: both forks appear, one says what it does, the other ends, without a reload.
  await page.waitForURL(/\/runs\/[a-z0-9]+$/);
  const run = page.url().split("/").at(-1);
  const card = (n) => page.getByRole("listitem").filter({ hasText: `Fork ${n}` });
  await card(1).getByText("Verified", { exact: true }).waitFor();
  await card(0).getByText("Working").waitFor();
  await card(0).getByText(/Bash|I wait/).first().waitFor();
  await page.getByRole("meter", { name: "Spent of the budget" }).waitFor();
  await row.getByText("Running").waitFor();
  await row.getByRole("img", { name: "1 done, 0 failed, 1 at work, 0 waiting" }).waitFor();

  // The fork: what it said, its tools in one card each, the file that it changed with a diff.
  await card(0).getByRole("link").click();
  const feed = page.getByRole("feed", { name: "Activity" });
  await page.getByRole("button", { name: "Play the session from here" }).waitFor();
  await page.getByRole("slider", { name: "Point of the session" }).fill("14");
  await feed.getByText("I look around first, word by word.").waitFor();
  const edit = feed.getByRole("article").filter({ hasText: "notes.txt" }).first();
  assert.match(await edit.locator("tr.added").innerText(), /uno/);
  await page.getByRole("button", { name: "Now", exact: true }).click();

  // A message that the agent answers, then an interrupt of a command that would take ten minutes.
  await page.keyboard.press("m");
  await page.keyboard.type("Say banana");
  await page.keyboard.press("Enter");
  await page.getByText("Sent: the agent reads it").waitFor();
  const { sandbox_id } = await w.api(`/runs/${run}/forks/0`);
  await w.api(`/sandboxes/${sandbox_id}/exec`, { command: ["touch", "/tmp/go"] });
  // Its answer is read while it is written.
  await page.getByRole("log", { name: "What the agent says right now" }).getByText("You asked for it").waitFor();
  assert.equal(await feed.getByText("You asked for it").count(), 0);
  await feed.getByText("You asked for it: banana.").waitFor();
  await feed.locator(".t-f1", { hasText: "red" }).first().waitFor();
  const sleeping = feed.getByRole("article").filter({ hasText: "sleep 600" });
  await sleeping.getByText("running", { exact: true }).waitFor();
  const events = (await w.api(`/runs/${run}/events?fork=0&types=agent.message_injected`)).events;
  assert.equal(events.length, 1);

  // Beside it: what its sandbox uses, its git, its checkpoints, each of which leads to its moment.
  const details = page.getByRole("complementary", { name: "Details" });
  for (const name of [/^CPU: /, /^Memory: /]) await details.getByRole("img", { name }).locator("canvas").waitFor();
  await details.getByRole("button", { name: "Ask" }).click();
  await details.getByText("M notes.txt").waitFor();
  await details.getByRole("button", { name: /^turn \d+/ }).first().click();
  await page.waitForURL(/[?&]at=\d+/);
  assert.equal(await feed.getByText("You asked for it").count(), 0);
  await page.getByRole("button", { name: "Now", exact: true }).click();

  // Pause and resume: heeded by the run, and seen here.
  await page.getByRole("link", { name: run, exact: true }).click();
  await page.getByRole("button", { name: "Pause" }).click();
  await page.getByText("Paused", { exact: true }).first().waitFor();
  await w.until(`/runs/${run}`, (r) => r.paused === true);
  await row.getByText("Paused").waitFor();
  await page.getByRole("button", { name: "Resume" }).click();
  await page.getByRole("button", { name: "Pause" }).waitFor();

  // One more fork while it works.
  await page.getByRole("button", { name: "Add forks" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Add", exact: true }).click();
  await card(2).waitFor();
  page.once("dialog", (d) => d.accept());
  await card(2).getByRole("link").click();
  await page.getByRole("button", { name: "Cancel fork" }).click();
  await page.getByText("Cancelled", { exact: true }).first().waitFor();

  await page.goto(`${w.url}/runs/${run}/forks/0`);
  await page.getByRole("textbox", { name: "Message to the agent" }).fill("Stop that");
  await page.getByRole("button", { name: "Interrupt" }).click();
  await feed.getByText("I stopped, and finish.").waitFor();
  await feed.getByText("Ended: success").waitFor();
  await page.getByText("Not verified").first().waitFor();

  // A call and its end are one card; that somebody is there is no news.
  assert.equal(await feed.getByRole("article").filter({ hasText: "sleep 600" }).count(), 1);
  assert.equal(await feed.getByText(/heartbeat/i).count(), 0);

  // The result's own diff.
  await page.getByRole("tab", { name: /Changes/ }).click();
  await page.getByRole("region", { name: "Changes of notes.txt" }).getByText("banana").waitFor();

  // The run: ranking with reasons, files by forks, timeline.
  await w.ended(run);
  await row.getByText("Done", { exact: true }).waitFor();
  assert.deepEqual(loads, []);
  await list.clean();
  await page.goto(`${w.url}/runs/${run}`);
  const ranking = page.locator("section").filter({ has: page.getByRole("heading", { name: "Ranking" }) });
  await ranking.getByText(/^verified/).waitFor();
  assert.match(await ranking.getByRole("listitem").first().innerText(), /Fork 1/);
  await page.getByRole("tab", { name: "Files × forks" }).click();
  await page.getByRole("row", { name: /notes\.txt/ }).waitFor();
  await page.getByRole("tab", { name: "Timeline" }).click();
  assert.ok((await page.locator(".lane i.agent").count()) >= 2);

  // Compare, and take it: the command, and the patch, which applies.
  await page.getByRole("link", { name: "Compare and apply" }).click();
  await page.getByText(`forkyard apply ${run}/1`).waitFor();
  await page.getByRole("region", { name: "Fork 1: notes.txt" }).getByText("two").waitFor();
  await page.getByRole("region", { name: "Fork 0: notes.txt" }).getByText("banana").waitFor();
  await page.getByRole("button", { name: "Show the patch" }).click();
  const shown = await page.getByTestId("patch").innerText();
  assert.match(shown, /^\+two$/m);
  const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("link", { name: "Download the patch" }).click()]);
  assert.equal(download.suggestedFilename(), `${run}-1.patch`);
  const { execFileSync } = await import("node:child_process");
  execFileSync("git", ["apply", "--check", await download.path()], { cwd: w.repo });

  // The finished session, played again from its beginning.
  await page.goto(`${w.url}/runs/${run}/forks/1`);
  await feed.getByText("Fork one is done.").waitFor();
  const slider = page.getByRole("slider", { name: "Point of the session" });
  await slider.fill("0");
  assert.equal(await feed.getByRole("article").count(), 0);
  await page.getByRole("combobox", { name: "Speed" }).selectOption("16×");
  await page.getByRole("button", { name: "Play the session from here" }).click();
  await feed.getByText("I write it down.").waitFor();
  await feed.getByText("Fork one is done.").waitFor();
  await page.clean();
});
