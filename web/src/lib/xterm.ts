/**
 * The terminal writes its colours and sizes into <style> elements, which the page's policy forbids. It is given a document
 * whose style elements are style sheets made by script instead; those are allowed, because no text of a page can make one.
 */
export function styled(real: Document): { document: Document; remove: () => void } {
  const sheets: CSSStyleSheet[] = [];
  const style = () => {
    const sheet = new CSSStyleSheet();
    sheets.push(sheet);
    real.adoptedStyleSheets.push(sheet);
    const stand = real.createElement("span");
    stand.hidden = true;
    Object.defineProperty(stand, "textContent", {
      get: () => "",
      set: (text: string) => sheet.replaceSync(text),
    });
    return stand;
  };
  const document = new Proxy(real, {
    get(target, key) {
      if (key === "createElement") return (tag: string, options?: ElementCreationOptions) => (tag === "style" ? style() : target.createElement(tag, options));
      const value = Reflect.get(target, key, target) as unknown;
      return typeof value === "function" ? (value as () => unknown).bind(target) : value;
    },
  });
  return {
    document,
    remove: () => (real.adoptedStyleSheets = real.adoptedStyleSheets.filter((s) => !sheets.includes(s))),
  };
}
