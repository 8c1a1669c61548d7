/** Thousands of events in one fork: loaded, scrolled, searched by the slider, without a frame that one would notice. */

import { assert, FULL, PATIENCE, scenario } from "./harness.mjs";

const EVENTS = FULL ? 10_000 : 1_000;
/** A turn of twenty calls has two events for each, and a few of its own. */
const CALLS = 20;
const TURNS = Math.ceil(EVENTS / (2 * CALLS + 1));

const call = `{ name = "Bash", input = { command = "echo a line of turn {{turn}}" } }`;
const MODEL = `
name = "flood"
${`[[turn]]
text = "Turn {{turn}}: twenty commands."
tools = [${Array(CALLS).fill(call).join(", ")}]
`.repeat(TURNS)}
[[turn]]
text = "All done."
`;

await scenario(async (w) => {
  w.commit({ "a.txt": "one\n" });
  const model = w.model("flood", MODEL);
  await w.serve();
  const { id } = await w.run(model, { max_turns: TURNS + 5, timeout_ms: 3_600_000 });
  const since = Date.now();
  let position = 0;
  for (;;) {
    const run = await w.api(`/runs/${id}`);
    if (run.status === "ended") break;
    if (run.position > position) position = run.position;
    assert.ok(Date.now() - since < PATIENCE * 20, "the run takes too long");
    await new Promise((done) => setTimeout(done, 500));
  }
  const page = await w.page();
  const opened = Date.now();
  await page.goto(`${w.url}/runs/${id}/forks/0`);
  const feed = page.getByRole("feed", { name: "Activity" });
  await feed.getByText("All done.").waitFor();
  const loaded = Date.now() - opened;
  const total = Number(await page.getByRole("slider", { name: "Point of the session" }).getAttribute("max"));
  assert.ok(total >= EVENTS, `${total} events`);
  // Only what is seen is on the page.
  const rows = await feed.getByRole("article").count();
  assert.ok(rows < 120, `${rows} rows on the page`);

  // From the end to the beginning, a third of a screen in each frame.
  const frames = await feed.evaluate(async (node) => {
    const times = [];
    let last = performance.now();
    while (node.scrollTop > 0 && times.length < 1200) {
      node.scrollTop -= 300;
      await new Promise(requestAnimationFrame);
      const now = performance.now();
      times.push(now - last);
      last = now;
    }
    return times.slice(1).sort((a, b) => a - b);
  });
  const at = (p) => frames[Math.min(frames.length - 1, Math.floor(frames.length * p))].toFixed(1);
  // There is text in every place that one stops at, and the whole can be reached.
  await feed.evaluate((node) => (node.scrollTop = 0));
  await feed.getByText("Turn 1: twenty commands.").waitFor();
  for (const part of [0.25, 0.5, 0.75]) {
    await feed.evaluate((node, p) => (node.scrollTop = node.scrollHeight * p), part);
    await page.waitForFunction(() => document.querySelector("[role=feed]")?.getBoundingClientRect && document.elementFromPoint(600, 500)?.closest("[role=article]"));
  }
  const sought = await page.evaluate(async () => {
    const slider = document.querySelector("input[type=range]");
    const times = [];
    for (let i = 1; i <= 20; i++) {
      const since = performance.now();
      slider.value = String(Math.floor((Number(slider.max) * i) / 20));
      slider.dispatchEvent(new Event("input", { bubbles: true }));
      await new Promise(requestAnimationFrame);
      times.push(performance.now() - since);
    }
    return Math.max(...times);
  });
  console.log(`${total} events: shown after ${loaded} ms; ${frames.length} frames of scrolling, ${at(0.5)} ms at the median, ${at(0.95)} ms at 95 %, ${at(1)} ms at most; replay slider ${sought.toFixed(0)} ms at most`);
  await page.clean();
});
