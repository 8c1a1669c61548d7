/** The server is killed in the middle: the page says so, comes back by itself, and shows every event once. */

import { assert, scenario } from "./harness.mjs";

const MODEL = `
name = "counts"
[[turn]]
repeat = true
when = { no_result = "step 60" }
text = "Next."
tools = [{ name = "Bash", input = { command = "n=$(cat n 2>/dev/null || echo 0); n=$((n+1)); echo $n > n; echo step $n; sleep 0.1" } }]
[[turn]]
text = "Counted."
`;

await scenario(async (w) => {
  w.commit({ "a.txt": "one\n" });
  const model = w.model("counts", MODEL);
  await w.serve();
  const { id } = await w.run(model, { max_turns: 200 });
  const page = await w.page();
  page.expected.push(/ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED_ENCODING|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE|status of 401/);
  // Everything that the page is told, as it is told it.
  await page.goto(`${w.url}/runs/${id}/forks/0`);
  const feed = page.getByRole("feed", { name: "Activity" });
  await feed.getByText("step 5", { exact: true }).waitFor();
  for (const at of ["step 15", "step 30"]) {
    await feed.getByText(at, { exact: true }).waitFor();
    await w.kill();
    await page.getByText("Not connected").waitFor();
    assert.match(await page.locator(".banner").innerText(), /What you see is from then/);
    await w.serve(w.port);
    await page.getByText("Not connected").waitFor({ state: "detached" });
  }
  await feed.getByText("Counted.").waitFor();
  await feed.getByText("Ended: success").waitFor();
  const slider = page.getByRole("slider", { name: "Point of the session" });
  // What was recorded, and what is shown: the same number, and each step once.
  const recorded = [];
  for (let after = 0; ; ) {
    const { events, next_after } = await w.api(`/runs/${id}/events?fork=0&limit=500&after=${after}`);
    recorded.push(...events);
    if (next_after === null) break;
    after = next_after;
  }
  await page.waitForFunction((n) => document.querySelector("input[type=range]")?.max === String(n), recorded.length);
  assert.equal(await slider.getAttribute("max"), String(recorded.length));
  const seen = [];
  await page.getByRole("tab", { name: "Terminal" }).click();
  const terminal = page.getByRole("feed", { name: "Terminal" });
  const total = Number(await terminal.getByRole("article").first().getAttribute("aria-setsize"));
  // A list that follows its end is let go of by whoever scrolls, and may be on its way to its end just then.
  await terminal.evaluate(async (node) => {
    for (let still = 0; still < 5; ) {
      node.scrollTop = 0;
      await new Promise((frame) => requestAnimationFrame(frame));
      still = node.querySelector('[data-index="0"]') ? still + 1 : 0;
    }
  });
  for (let index = 0; index < total; index++) {
    const row = terminal.locator(`[data-index="${index}"]`);
    await row.waitFor({ state: "attached" });
    await row.scrollIntoViewIfNeeded();
    seen.push(/step (\d+)/.exec(await row.innerText())?.[1]);
  }
  const steps = recorded.filter((e) => e.type === "agent.tool_completed").map((e) => /step (\d+)/.exec(JSON.stringify(e.data.tool_response))?.[1]);
  assert.deepEqual(seen, steps);
  assert.deepEqual(steps, Array.from({ length: 60 }, (_, i) => String(i + 1)));
  await page.clean();
});
