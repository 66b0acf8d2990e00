/** The key that a page asks for when a pod says 401; it is kept for this tab only, and goes with it. */

const NAME = "headrace.key";

export const apiKey = () => sessionStorage.getItem(NAME) ?? undefined;

export const authorization = () => (apiKey() ? { Authorization: `Bearer ${apiKey()}` } : {});

/** Ask for a key; answers whether one was given. */
export function askForKey(why) {
  const dialog = document.querySelector("#key-dialog"), field = dialog.querySelector("input");
  dialog.querySelector("#key-why").textContent = why;
  field.value = "";
  if (!dialog.open) dialog.showModal();
  field.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const isGiven = dialog.returnValue === "use" && field.value.trim() !== "";
      if (isGiven) sessionStorage.setItem(NAME, field.value.trim());
      if (dialog.returnValue === "forget") sessionStorage.removeItem(NAME);
      dialog.returnValue = field.value = "";
      showKey();
      if (isGiven) document.dispatchEvent(new Event("headrace-key"));
      resolve(isGiven);
    }, { once: true });
  });
}

/** `fetch` of this pod with the key; a 401 asks for one and tries again. */
export async function ask(path, options = {}) {
  for (;;) {
    const response = await fetch(path, { ...options, headers: { ...options.headers, ...authorization() } });
    if (![401, 403].includes(response.status)) return response;
    const { error } = await response.clone().json().catch(() => ({}));
    if (!(await askForKey(error?.message ?? "This pod asks for an API key."))) return response;
  }
}

/** Until a key is given, by whatever way. */
export const untilKey = () => new Promise((resolve) => document.addEventListener("headrace-key", resolve, { once: true }));

/** The button in the head of the page, which says whether there is a key. */
export function showKey() {
  const button = document.querySelector("#key-button");
  button.textContent = apiKey() ? "Key set" : "No key";
  button.dataset.set = Boolean(apiKey());
}

export function initKey() {
  showKey();
  document.querySelector("#key-button").addEventListener("click", () => {
    askForKey("It is kept in this tab only, and sent to the pods of this deployment.");
  });
}
