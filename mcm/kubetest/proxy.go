package kubetest

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/rest"
)

// A Proxy stands in front of the API server. It counts requests, refuses some on demand, and can hold back the watches of
// a resource, so that caches become stale. It is safe for concurrent use.
type Proxy struct {
	url string

	mu      sync.Mutex
	held    map[string]chan struct{} // by resource; closed by Release
	count   map[string]int           // by verb and resource
	refused map[string]bool          // by verb and resource
}

// NewProxy puts a proxy in front of an API server until the test ends.
func NewProxy(tb testing.TB, cfg *rest.Config) *Proxy {
	tb.Helper()
	transport, err := rest.TransportFor(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	target, err := url.Parse(cfg.Host)
	if err != nil {
		tb.Fatal(err)
	}
	p := &Proxy{held: map[string]chan struct{}{}, count: map[string]int{}, refused: map[string]bool{}}
	handler := &httputil.ReverseProxy{
		Transport: transport, FlushInterval: -1, ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) {
			w.WriteHeader(http.StatusBadGateway) // the client is gone, or the test is over
		},
		Rewrite: func(req *httputil.ProxyRequest) { req.SetURL(target) },
		ModifyResponse: func(resp *http.Response) error {
			if isWatch(resp.Request) {
				resp.Body = &heldBody{resp.Body, p, resourceOf(resp.Request.URL.Path), resp.Request.Context()}
			}

			return nil
		},
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if p.countRequest(req) {
			http.Error(w, "the quota is used up", http.StatusForbidden)

			return
		}
		handler.ServeHTTP(w, req)
	}))
	p.url = server.URL
	tb.Cleanup(func() { server.CloseClientConnections(); server.Close() })

	return p
}

// Config returns a config for clients that go through the proxy.
func (p *Proxy) Config() *rest.Config { return &rest.Config{Host: p.url, QPS: -1} }

func isWatch(req *http.Request) bool {
	v := req.URL.Query().Get("watch")

	return v == "true" || v == "1"
}

// resourceOf returns "machines", "machinesets" and so on; "machines/status" for a
// subresource. Paths are /apis/<group>/<version>/namespaces/<namespace>/<resource>.
func resourceOf(path string) string {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	const resource, subresource = 5, 7
	switch {
	case len(parts) <= resource || parts[0] != "apis":
		return ""
	case len(parts) > subresource:
		return parts[resource] + "/" + parts[subresource]
	default:
		return parts[resource]
	}
}

// countRequest counts a request and reports whether to refuse it.
func (p *Proxy) countRequest(req *http.Request) (refuse bool) {
	if isWatch(req) {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	what := req.Method + " " + resourceOf(req.URL.Path)
	p.count[what]++

	return p.refused[what]
}

// Refuse sets whether requests such as "POST machines" are refused.
func (p *Proxy) Refuse(what string, refused bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refused[what] = refused
}

// Requests returns the number of requests such as "POST machines" since Reset, without watches.
func (p *Proxy) Requests(what string) int {
	p.mu.Lock()
	defer p.mu.Unlock()

	return p.count[what]
}

// All returns the number of requests for the project's kinds since Reset, in sum and by request.
func (p *Proxy) All() (n int, what map[string]int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	what = map[string]int{}
	for request, times := range p.count {
		if strings.Contains(request, " machine") {
			what[request] = times
			n += times
		}
	}

	return n, what
}

// Reset sets the counts of requests to zero.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.count)
}

// Hold holds back the events of watches of resources such as "machines" until Release.
func (p *Proxy) Hold(resources ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, resource := range resources {
		if p.held[resource] == nil {
			p.held[resource] = make(chan struct{})
		}
	}
}

// Release delivers the events that Hold held back.
func (p *Proxy) Release(resources ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, resource := range resources {
		if gate := p.held[resource]; gate != nil {
			close(gate)
			delete(p.held, resource)
		}
	}
}

// A heldBody is the body of a watch that returns no data while its resource is held.
type heldBody struct {
	io.ReadCloser

	proxy    *Proxy
	resource string
	ctx      context.Context
}

func (b *heldBody) Read(buf []byte) (int, error) {
	n, err := b.ReadCloser.Read(buf)
	b.proxy.mu.Lock()
	gate := b.proxy.held[b.resource]
	b.proxy.mu.Unlock()
	if gate == nil {
		return n, err
	}
	select {
	case <-gate:
		return n, err
	case <-b.ctx.Done():
		return 0, b.ctx.Err()
	}
}
