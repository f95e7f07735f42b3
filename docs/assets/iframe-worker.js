// Browsers start no worker for a page that was opened as a file. Then a hidden frame runs its program, in this thread, so that
// the search works without a server, too.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      const inside = (this.inside = frame.contentWindow)
      const run = (source) =>
        new Promise((done, failed) => {
          const script = inside.document.createElement("script")
          script.onload = done
          script.onerror = failed
          script.src = source
          inside.document.documentElement.append(script)
        })
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...sources) => sources.reduce((before, each) => before.then(() => run(each)), Promise.resolve())
      this.ready = run(url)
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
}
