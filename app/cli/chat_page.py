"""Web page of `app.cli.chat_server`: a conversation in which every model answers, side by side
where there is room.
"""

TEMPERATURE = "{temperature}"  # stands in PAGE for that of the command line
PAGE = r"""<!doctype html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Graphfold</title>
<style>
:root { color-scheme: light dark; --soft: color-mix(in srgb, CanvasText 8%, Canvas) }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 70rem; height: 100dvh;
  display: flex; flex-direction: column }
h1, h2 { font-size: .85rem; font-weight: 600; margin: 0; opacity: .7; overflow-wrap: anywhere }
h1 { padding: .75rem 1rem }
main { flex: 1; overflow-y: auto; padding: 0 1rem }
p { margin: .25rem 0; white-space: pre-wrap; overflow-wrap: anywhere }
.user { background: var(--soft); border-radius: .5rem; padding: .5rem .75rem; margin-top: 1rem }
.answers { display: grid; gap: 0 2rem; padding: 0 .75rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)) }
.busy::after { content: "▍"; opacity: .5 }
.note { font-size: .85rem; opacity: .7 }
.error { color: light-dark(#b00020, #ff8a80) }
form { padding: .75rem 1rem }
textarea { width: 100%; font: inherit; padding: .5rem .75rem; border-radius: .5rem;
  resize: vertical; display: block }
.row { display: flex; flex-wrap: wrap; align-items: center; gap: .5rem; margin-top: .5rem }
button, input { font: inherit; padding: .2rem .75rem } input { width: 5rem }
label { margin-left: auto }
</style>
<h1 id="models"></h1>
<main id="talk" aria-live="polite"></main>
<form id="form">
<textarea id="text" rows="3" autofocus aria-label="Message"
  placeholder="Enter sends, Shift+Enter begins a line"></textarea>
<div class="row">
<button id="send">Send</button>
<button id="stop" type="button" hidden>Stop</button>
<button id="reset" type="button">Reset</button>
<button id="save" type="button">Save</button>
<label>Temperature <input id="temperature" type="number" min="0" step="any" value="{temperature}">
</label>
</div>
</form>
<script>
const at = id => document.getElementById(id);
let talks = [], stopping = new AbortController(), answering = false;
function add(parent, kind, text = "", tag = "p") {
  const line = document.createElement(tag);
  line.className = kind; line.textContent = text; parent.append(line);
  at("talk").scrollTop = at("talk").scrollHeight;
  return line;
}
function busy(now) {
  answering = at("send").hidden = now;
  at("stop").hidden = !now;
}
async function* eventsOf(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part; !(part = await reader.read()).done;) {
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event !== "data: [DONE]") yield JSON.parse(event.slice(6));
  }
}
async function answer(talk, text, box) {
  const said = [...talk.messages, {role: "user", content: text}];
  const line = add(box, "answer busy");
  let finish = null, failed = false;
  try {
    const temperature = parseFloat(at("temperature").value);
    const asked = {model: talk.id, messages: said, stream: true};
    if (!isNaN(temperature)) asked.temperature = temperature;
    const reply = await fetch("/v1/chat/completions", {method: "POST", signal: stopping.signal,
      headers: {"Content-Type": "application/json"}, body: JSON.stringify(asked)});
    if (!reply.ok) {
      const {message, code} = (await reply.json()).error;
      throw new Error(message + (code === "context_length_exceeded" ? "; Reset begins anew" : ""));
    }
    for await (const {choices: [choice]} of eventsOf(reply)) {
      const low = at("talk").scrollHeight - at("talk").scrollTop - at("talk").clientHeight < 40;
      line.textContent += choice.delta.content ?? "";
      if (low) at("talk").scrollTop = at("talk").scrollHeight;
      finish = choice.finish_reason;
    }
    if (!finish) throw new Error("the server has ended");
    if (finish === "length") add(box, "note", "ended at its greatest length");
  } catch (error) {
    if (failed = error.name !== "AbortError")
      add(box, "error", error instanceof TypeError ? "the server does not answer" : error.message);
    else add(box, "note", "stopped");
  }
  line.classList.remove("busy");
  if (!failed) talk.messages = [...said, {role: "assistant", content: line.textContent}];
}
async function begin() {
  try {
    const models = (await (await fetch("/v1/models")).json()).data;
    at("models").textContent = models.map(model => model.id).join(" · ");
    talks = models.map(({id}) => ({id, messages: []}));
  } catch { add(at("talk"), "error", "the server does not answer"); }
}
at("form").onsubmit = async event => {
  event.preventDefault();
  const text = at("text").value;
  if (!text.trim() || answering || !at("form").reportValidity()) return;
  at("text").value = "";
  stopping = new AbortController();
  add(at("talk"), "user", text);
  const boxes = add(at("talk"), "answers", "", "div");
  busy(true);
  for (const talk of talks) {  // the server generates one at a time
    const box = add(boxes, "", "", "div");
    if (talks.length > 1) add(box, "", talk.id, "h2");
    await answer(talk, text, box);
  }
  busy(false);
};
at("text").onkeydown = event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("form").requestSubmit();
};
at("stop").onclick = () => stopping.abort();
at("reset").onclick = () => {
  stopping.abort();
  talks = talks.map(({id}) => ({id, messages: []}));
  at("talk").replaceChildren();
  at("text").focus();
};
at("save").onclick = () => {
  const rows = talks.map(({id, messages}) => JSON.stringify({model: id, messages}) + "\n");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(rows, {type: "application/jsonl"}));
  link.download = "conversation.jsonl";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);  // when it is read
};
begin();
</script>
</html>
"""
