import { readdirSync, readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { gzipSync } from "node:zlib";
import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

/** What a browser loads before anything is seen, compressed as the server does it. */
const FIRST_LOAD_BYTES = 200_000;

/** Follows index.html to the scripts, styles and fonts that the first page needs; chunks that are loaded later don't count. */
function firstLoad() {
  let out;
  return {
    name: "first-load",
    configResolved(config) {
      out = pathToFileURL(`${resolve(config.root, config.build.outDir)}/`);
    },
    closeBundle() {
      const read = (name) => readFileSync(new URL(name, out));
      const assets = readdirSync(new URL("assets/", out)).map((name) => `assets/${name}`);
      const wanted = new Set(["index.html"]);
      for (const name of wanted) {
        if (!/\.(html|js|css)$/.test(name)) continue;
        const text = read(name).toString();
        for (const asset of assets) {
          const base = asset.slice("assets/".length);
          const lazy = text.includes(`import(\`./${base}\`)`) || text.includes(`import("./${base}")`);
          if (text.includes(base) && !lazy && !text.includes(`"${asset}"`)) wanted.add(asset);
          if (name === "index.html" && text.includes(asset)) wanted.add(asset);
        }
      }
      let total = 0;
      for (const name of wanted) {
        const bytes = read(name);
        total += name.endsWith(".woff2") ? bytes.length : gzipSync(bytes, { level: 9 }).length;
      }
      const line = `first load: ${(total / 1000).toFixed(1)} KB compressed (${[...wanted].join(", ")})`;
      if (total > FIRST_LOAD_BYTES) throw new Error(`${line}; at most ${FIRST_LOAD_BYTES / 1000} KB`);
      console.log(line);
    },
  };
}

/** What is bundled is others' work: their licences go with it. */
function licences() {
  const bundled = ["svelte", "uplot", "@xterm/xterm", "@xterm/addon-fit", "@fontsource-variable/inter"];
  return {
    name: "licences",
    generateBundle() {
      const texts = bundled.map((name) => {
        const dir = new URL(`node_modules/${name}/`, import.meta.url);
        const file = readdirSync(dir).find((f) => /^licen[cs]e/i.test(f));
        return `${name}\n\n${readFileSync(new URL(file, dir), "utf8").replaceAll("\r", "").trim()}\n`;
      });
      this.emitFile({ type: "asset", fileName: "licences.txt", source: texts.join("\n----\n\n") });
    },
  };
}

export default defineConfig({
  plugins: [svelte(), licences(), firstLoad()],
  build: {
    outDir: "../crates/forkyard-server/assets/web",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
    chunkSizeWarningLimit: 1000,
  },
  server: { proxy: { "/api": { target: "http://127.0.0.1:4610", ws: true }, "/login": "http://127.0.0.1:4610" } },
});
