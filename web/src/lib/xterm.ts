/**
 * The terminal writes its colours and sizes into <style> elements, which the page's policy forbids. While it opens, the style
 * elements that it makes are stand-ins of style sheets made by script; those are allowed, because no text of a page can
 * make one.
 */
export function withSheets(open: () => void): () => void {
  const sheets: CSSStyleSheet[] = [];
  const make = document.createElement.bind(document);
  const standIn = () => {
    const sheet = new CSSStyleSheet();
    sheets.push(sheet);
    document.adoptedStyleSheets.push(sheet);
    const span = make("span");
    span.hidden = true;
    Object.defineProperty(span, "textContent", { get: () => "", set: (text: string) => sheet.replaceSync(text) });
    return span;
  };
  const patched = (tag: string, options?: ElementCreationOptions) => (tag === "style" ? standIn() : make(tag, options));
  document.createElement = patched as typeof document.createElement;
  try {
    open();
  } finally {
    // The prototype's is the real one.
    Reflect.deleteProperty(document, "createElement");
  }
  return () => {
    document.adoptedStyleSheets = document.adoptedStyleSheets.filter((s) => !sheets.includes(s));
  };
}
