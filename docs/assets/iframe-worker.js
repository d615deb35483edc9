/* Search from file://, where a browser refuses to start a Worker: the same script runs in a hidden frame, whose
   messages arrive here. Loads nothing from elsewhere. */
(() => {
  if (window.location.protocol !== "file:") return;

  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      const page = this.frame.contentDocument;
      page.open();
      page.write("<!doctype html><title>search</title>");
      page.close();
      inside.postMessage = (data) => queueMicrotask(() => this.tell(data));
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = page.createElement("script");
          script.src = source;
          script.onload = resolve;
          script.onerror = () => reject(new Error(`cannot load ${source}`));
          page.head.appendChild(script);
        });
      inside.importScripts = (...sources) =>
        sources.reduce(
          (before, source) => before.then(() => load(new URL(source, url))),
          Promise.resolve(),
        );
      load(new URL(url, document.baseURI)).then(() => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.hand(data));
      });
    }

    hand(data) {
      const inside = this.frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }

    tell(data) {
      const event = new MessageEvent("message", { data });
      if (this.onmessage) this.onmessage(event);
      this.dispatchEvent(event);
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.hand(data);
    }

    terminate() {
      this.frame.remove();
    }
  }

  window.Worker = FrameWorker;
})();
