/** The raw frames of a job in a format of the reader's choice, from its start, as any client of that format gets them. */

const MOST = 200_000;

export async function showOther(pane, origin, job, format, apiKey, signal) {
  const headers = apiKey ? { Authorization: `Bearer ${apiKey}` } : {};
  try {
    const response = await fetch(`${origin}/v1/streams/${job}?format=${encodeURIComponent(format)}`, { headers, signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part; !(part = await reader.read()).done; ) {
      if (signal.aborted) return;
      pane.append(part.value);
      while (pane.textContent.length > MOST && pane.childNodes.length > 1) pane.firstChild.remove();
      pane.scrollTop = pane.scrollHeight;
    }
  } catch (error) {
    if (!signal.aborted) pane.append(`\n(${error.message})\n`);
  }
}
