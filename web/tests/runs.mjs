/** The list of runs: all of them are searched, not those that are shown; it follows what happens, and says when it can't. */

import { assert, scenario } from "./harness.mjs";

const MODEL = `
name = "none"
[[turn]]
text = "Nobody asks."
`;
const MANY = 120;

await scenario(async (w) => {
  w.commit({ "a.txt": "one\n" });
  const model = w.model("none", MODEL);
  await w.serve(0, { work: false });
  const run = (prompt) => w.run(model, { prompt });
  await run("The needle among them");
  for (let i = 0; i < MANY; i += 10) await Promise.all(Array.from({ length: 10 }, (_, k) => run(`Chore ${i + k} of many`)));

  const page = await w.page();
  const rows = page.locator("tbody tr");
  const loads = [];
  page.on("request", (request) => {
    if (/\/api\/v1\/runs\?.*limit=100/.test(request.url())) loads.push(request.url());
  });
  const filter = (name) => page.getByRole("group", { name: "Show" }).getByRole("button", { name });
  await page.getByText(`The newest 100 of ${MANY + 1} runs`).waitFor();
  assert.equal(await page.getByText("needle").count(), 0);
  await filter(`All ${MANY + 1}`).waitFor();

  // What is on no page that was loaded is found, by words in any order and case; the address says what was searched for.
  await page.keyboard.press("/");
  await page.keyboard.type("AMONG need");
  await page.getByRole("link", { name: "The needle among them" }).waitFor();
  await rows.nth(1).waitFor({ state: "detached" });
  await filter("All 1").waitFor();
  await filter("Live 1").waitFor();
  await page.reload();
  await page.getByRole("link", { name: "The needle among them" }).waitFor();
  assert.equal(await page.getByRole("searchbox", { name: "Search runs" }).inputValue(), "AMONG need");
  await filter("Done").click();
  await page.getByRole("heading", { name: "Nothing matches" }).waitFor();
  assert.match(page.url(), /q=AMONG\+need&show=done/);
  await page.getByRole("button", { name: "Show all runs" }).click();
  await page.getByRole("button", { name: "Older runs" }).click();
  await rows.nth(MANY).waitFor();
  await page.getByText(`${MANY + 1} runs`).waitFor();

  // A new run is there without a reload and without anybody asking for the list; the second page stays.
  loads.length = 0;
  await run("Made just now");
  await rows.first().getByText("Made just now").waitFor();
  await filter(`All ${MANY + 2}`).waitFor();
  assert.equal(await rows.count(), MANY + 2);
  assert.deepEqual(loads, []);
  // A list that is searched takes what the search finds, and nothing else.
  await page.goto(`${w.url}/?q=chore`);
  await filter(`All ${MANY}`).waitFor();
  await run("Something else");
  await run("One more chore");
  await rows.first().getByText("One more chore").waitFor();
  assert.equal(await page.getByText("Something else").count(), 0);

  // Killed: it says so, keeps what it knew, and shows what happened meanwhile.
  page.expected.push(/ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED_ENCODING|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE/);
  await w.kill();
  await page.getByText("Not connected").waitFor();
  assert.equal(await rows.first().getByText("One more chore").count(), 1);
  await w.serve(w.port, { work: false });
  await run("The last chore");
  await page.getByText("Not connected").waitFor({ state: "detached" });
  await rows.first().getByText("The last chore").waitFor();
  await filter(`All ${MANY + 2}`).waitFor();
  await page.clean();
});
