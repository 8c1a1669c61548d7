/** Pictures of every page for the documentation: `FORKYARD_BIN=… node tests/shots.mjs ../docs/dashboard`. */

import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { scenario } from "./harness.mjs";

const out = process.argv[2];
mkdirSync(out, { recursive: true });
const demo = new URL("../../crates/forkyard/demo/", import.meta.url);
const script = readFileSync(new URL("script.toml", demo), "utf8");
const slow = `
name = "slow"
price_as = "sonnet"
[[turn]]
text = "I read the converter and its tests first, then I will decide where the subtractive pairs belong."
tools = [{ name = "Bash", input = { command = "sh tests/run.sh" } }, { name = "Read", input = { file_path = "roman.sh" } }]
[[turn]]
text = "The table has no entries for 4, 9, 40, 90, 400 and 900. I add them in order and run the tests again."
tools = [{ name = "Edit", input = { file_path = "roman.sh", old_string = "10:X 5:V 1:I", new_string = "10:X 9:IX 5:V 4:IV 1:I" } }, { name = "Bash", input = { command = "for i in $(seq 200); do echo checking $i; sleep 2; done", timeout = 600000 } }]
`;

await scenario(async (w) => {
  w.commit({ "roman.sh": readFileSync(new URL("repo/roman.sh", demo), "utf8"), "tests/run.sh": readFileSync(new URL("repo/tests/run.sh", demo), "utf8") });
  await w.serve();
  const more = { prompt: "The tests in tests/run.sh fail. Find out why and correct roman.sh.", verify: "sh tests/run.sh", protect: ["tests/**"], budget_usd: 2 };
  const first = await w.run(w.model("demo", script), { ...more, forks: 4 });
  await w.ended(first.id);
  const failed = await w.run(w.model("bad", "name = 'x'\n[[turn]]\ntext = 'I can not do that.'\n"), { ...more, prompt: "Port roman.sh to awk", setup: "exit 1" });
  await w.ended(failed.id);
  for (const prompt of ["Print an error for numbers that are not whole", "Make the tests print only what failed"]) {
    const made = await w.run(w.model("demo", script), { prompt, forks: 2, verify: "sh tests/run.sh", budget_usd: 1 });
    await w.ended(made.id);
  }
  const given = await w.run(w.model("slow", slow), { ...more, prompt: "Rewrite the converter as a table" });
  await w.until(`/runs/${given.id}/events?types=agent.file_edited`, (e) => e.events.length >= 1);
  await w.api(`/runs/${given.id}/cancel`, null, "POST");
  await w.ended(given.id);
  const box = await w.api("/sandboxes", { id: "tryout" });
  await w.api(`/sandboxes/${box.id}/exec`, { command: ["/bin/sh", "-c", "mkdir src && echo 'fn main() {}' > src/main.rs && echo '# Notes' > README.md"] });
  // Something to see in its charts.
  const busy = w.api(`/sandboxes/${box.id}/exec`, { command: ["/bin/sh", "-c", "for n in 1 2 3 4 5 6; do timeout $n sh -c 'while :; do :; done'; head -c 40000000 /dev/zero | tail -c 1000000 > /tmp/$n; sleep 2; done"], timeout_ms: 120_000 });
  const live = await w.run(w.model("slow", slow), { ...more, prompt: "Support numbers up to 3999 in roman.sh, with tests", forks: 3, max_concurrent: 2 });
  await w.until(`/runs/${live.id}/events?types=agent.file_edited`, (e) => e.events.length >= 2);
  const views = [
    ["runs", "/"],
    ["run", `/runs/${first.id}`],
    ["run-live", `/runs/${live.id}`],
    ["timeline", `/runs/${first.id}?tab=timeline`],
    ["files", `/runs/${first.id}?tab=files`],
    ["fork", `/runs/${first.id}/forks/0`],
    ["fork-live", `/runs/${live.id}/forks/0`],
    ["compare", `/runs/${first.id}/compare?forks=0,1`],
    ["sandboxes", "/sandboxes"],
    ["sandbox", `/sandboxes/${box.id}`],
    ["shell", `/sandboxes/${box.id}?tab=shell`],
    ["new", "/new"],
    ["health", "/health"],
  ];
  await w.browser();
  const press = await (await w.chromium.newContext()).newPage();
  /** Small enough to be kept with the sources. */
  const keep = async (page, name) => {
    const png = (await page.screenshot()).toString("base64");
    const small = await press.evaluate(async (data) => {
      const image = new Image();
      image.src = `data:image/png;base64,${data}`;
      await image.decode();
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [image.width, image.height];
      canvas.getContext("2d").drawImage(image, 0, 0);
      return canvas.toDataURL("image/webp", 0.8).split(",")[1];
    }, png);
    writeFileSync(`${out}/${name}.webp`, Buffer.from(small, "base64"));
    if (process.env.PNG) writeFileSync(`${out}/${name}.png`, Buffer.from(png, "base64"));
  };
  for (const [size, viewport] of [["desktop", { width: 1280, height: 800 }], ["phone", { width: 390, height: 844 }]]) {
    for (const colorScheme of ["light", "dark"]) {
      const page = await w.page({ viewport, colorScheme });
      for (const [name, path] of views) {
        await page.goto(w.url + path);
        await page.locator("h1").first().waitFor();
        await page.waitForTimeout(name.startsWith("fork-live") || name === "sandbox" ? 3000 : 1000);
        await page.waitForFunction(() => !/Loading…|Asking…|it takes a moment/.test(document.body.innerText));
        if (name === "shell") {
          await page.keyboard.type("ls -la && uname -r\n");
          await page.waitForTimeout(800);
        }
        await keep(page, `${name}-${size}-${colorScheme}`);
      }
      await page.context().close();
    }
  }
  await busy;
  const page = await (await w.chromium.newContext({ viewport: { width: 1280, height: 800 } })).newPage();
  await page.goto(w.url);
  await page.getByRole("heading", { name: "Log in" }).waitFor();
  await keep(page, "login-desktop-light");
});
