"""Web page of `app.cli.chat_server`: a conversation with every model, side by side."""

PAGE = """\
<!doctype html>
<meta charset="utf-8"><title>Graphfold</title>
<style>
body { font: 16px/1.5 sans-serif; margin: 1rem auto; max-width: 80rem; padding: 0 1rem }
#models { display: flex; gap: 2rem } #models > div { flex: 1; min-width: 0 }
h2 { font-size: 1rem; overflow-wrap: anywhere } p { white-space: pre-wrap; overflow-wrap: anywhere }
p.user { background: #eee; padding: .5rem } p.error { color: #b00 }
textarea { box-sizing: border-box; width: 100% }
</style>
<div id="models"></div>
<textarea id="text" rows="3" placeholder="Enter sends, Shift+Enter begins a line"></textarea>
<button id="stop">Stop</button> <button id="reset">Reset</button>
<script>
const at = id => document.getElementById(id);
let talks = [], stopping = new AbortController(), answering = 0;
const add = (talk, kind, text) => {
  const line = document.createElement("p");
  line.className = kind; line.textContent = text; talk.box.append(line);
  return line;
};
async function answer(talk, text) {
  talk.messages.push({role: "user", content: text});
  add(talk, "user", text);
  const line = add(talk, "assistant", "");
  try {
    const body = JSON.stringify({model: talk.id, messages: talk.messages, stream: true});
    const headers = {"Content-Type": "application/json"};
    const reply = await fetch("/v1/chat/completions",
      {method: "POST", headers, body, signal: stopping.signal});
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "", part; !(part = await reader.read()).done;) {
      const events = (rest + part.value).split("\\n\\n");
      rest = events.pop();
      for (const event of events.filter(each => each !== "data: [DONE]"))
        line.textContent += JSON.parse(event.slice(6)).choices[0].delta.content ?? "";
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      add(talk, "error", error.message);
      talk.messages.pop();
      return;
    }
  }
  talk.messages.push({role: "assistant", content: line.textContent});
}
async function begin() {
  const models = (await (await fetch("/v1/models")).json()).data;
  at("models").replaceChildren();
  talks = models.map(({id}) => {
    const box = document.createElement("div"), head = document.createElement("h2");
    head.textContent = id; box.append(head); at("models").append(box);
    return {id, box, messages: []};
  });
}
at("text").onkeydown = event => {
  if (event.key !== "Enter" || event.shiftKey) return;
  event.preventDefault();
  const text = at("text").value;
  if (!text.trim() || answering) return;
  at("text").value = "";
  stopping = new AbortController();
  answering = talks.length;
  for (const talk of talks) answer(talk, text).finally(() => answering--);
};
at("stop").onclick = () => stopping.abort();
at("reset").onclick = () => { stopping.abort(); begin() };
begin();
</script>
"""
