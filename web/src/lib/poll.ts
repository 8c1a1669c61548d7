/** Asks again and again while the page is looked at. */

export function poll(ask: () => Promise<unknown>, everyMs: number): () => void {
  let stopped = false;
  let timer: ReturnType<typeof setTimeout> | undefined;
  const round = async () => {
    clearTimeout(timer);
    if (document.visibilityState === "visible") await ask().catch(() => {});
    if (!stopped) timer = setTimeout(round, everyMs);
  };
  const seen = () => {
    if (document.visibilityState === "visible") void round();
  };
  document.addEventListener("visibilitychange", seen);
  void round();
  return () => {
    stopped = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", seen);
  };
}
