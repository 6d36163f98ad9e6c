// Render docs/drawings/*.d2 to docs/assets/*.svg: light and dark in one file, the digest of the source in a comment.
// usage: node draw.mjs NODE_MODULES
import crypto from "node:crypto";
import fs from "node:fs";
import path from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

async function main() {
  const d2Package = path.resolve(process.argv[2], "@terrastruct/d2/dist/node-esm/index.js");
  const { D2 } = await import(pathToFileURL(d2Package));
  const root = path.resolve(path.dirname(fileURLToPath(import.meta.url)), "..");
  const d2 = new D2();
  for (const name of fs.readdirSync(path.join(root, "drawings")).filter((n) => n.endsWith(".d2")).sort()) {
    const source = fs.readFileSync(path.join(root, "drawings", name), "utf8");
    const options = { layout: "elk", themeID: 0, darkThemeID: 200, pad: 16, sketch: false };
    const compiled = await d2.compile(source, { options });
    const svg = await d2.render(compiled.diagram, { ...compiled.renderOptions, ...options, noXMLTag: true });
    // a width that gives labels of about 15 pixels; pages scale it down on narrow screens
    const [, width, height] = svg.match(/viewBox="0 0 (\d+) (\d+)"/);
    const size = `width="${Math.round(width * 0.75)}" height="${Math.round(height * 0.75)}"`;
    const digest = crypto.createHash("sha256").update(source).digest("hex");
    fs.writeFileSync(path.join(root, "assets", name.replace(/\.d2$/, ".svg")), `<!-- source ${digest} -->\n${svg.replace("<svg ", `<svg ${size} `)}\n`);
    console.log(`assets/${name.replace(/\.d2$/, ".svg")}`);
  }
  process.exit(0);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
