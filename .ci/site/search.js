// Searches in pages that are opened as files, for which browsers start no workers: an iframe in place of each.
if (location.protocol === "file:")
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      this.inner = frame.contentWindow;
      this.send = this.inner.postMessage.bind(this.inner); // The worker's own postMessage replaces it.
      window.addEventListener("message", (event) => {
        if (event.source !== this.inner) return;
        this.dispatchEvent(new MessageEvent("message", { data: event.data }));
        this.onmessage?.(event);
      });
      this.inner.document.write(`<body><script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = (...urls) => urls.reduce((loaded, url) => loaded.then(() => new Promise((done) => {
          const script = document.body.appendChild(document.createElement("script"));
          script.onload = done;
          script.src = url;
        })), Promise.resolve());
      <\/script><script src="${url}"><\/script></body>`);
      this.inner.document.close();
    }
    postMessage(data) {
      this.inner.document.readyState === "complete"
        ? this.send(data, "*")
        : this.inner.addEventListener("load", () => this.send(data, "*"));
    }
    terminate() {}
  };
