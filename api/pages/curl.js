/** Commands for a POSIX shell. The key itself is never in them. */

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** What asks the same, and, once a job is known, what goes on after the last event that was seen. */
export function curlOf(origin, body, hasKey, run) {
  const key = hasKey ? ` \\\n  -H "Authorization: Bearer $HEADRACE_API_KEY"` : "";
  const said = quoted(JSON.stringify({ ...body, stream: true }, null, 2));
  const lines = [`curl -N ${origin}/v1/chat/completions${key} \\\n  -H 'Content-Type: application/json' -d ${said}`];
  if (run?.job && run.position) {
    lines.push("", "# the rest of this answer, from any pod");
    lines.push(`curl -N ${run.at || origin}/v1/streams/${run.job}${key} \\\n  -H 'Last-Event-ID: ${run.position}'`);
  }
  return lines.join("\n");
}
