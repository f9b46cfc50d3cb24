package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"strings"
	"sync"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// A gate is an HTTP proxy that can stop one request, so that a program waits at a known
// point, where the test can kill it.
type gate struct {
	url   string
	proxy *httputil.ReverseProxy

	mu    sync.Mutex
	armed *stop
	shut  bool
}

// A stopAt says which request is stopped: the first of that method whose path
// matches a pattern (as in path.Match) and whose body contains a text.
type stopAt struct {
	method, path, body string
	// answered stops the answer, not the request: the server has done the work, but the
	// program does not know.
	answered bool
}

func (s stopAt) String() string {
	where := "before"
	if s.answered {
		where = "after"
	}
	return fmt.Sprintf("%s %s %s %q", where, s.method, s.path, s.body)
}

// A stop is one request being stopped.
type stop struct {
	stopAt

	reached chan struct{} // closed when the request is there
	letGo   chan struct{} // closed to let it go on
	over    chan struct{} // closed when it is answered, or its client is gone
}

// openGate opens a gate before a server.
func (e *env) openGate(server string, transport http.RoundTripper) *gate {
	e.Helper()
	target, err := url.Parse(server)
	e.must(err)
	g := &gate{proxy: &httputil.ReverseProxy{
		Transport: transport,
		Rewrite:   func(r *httputil.ProxyRequest) { r.SetURL(target) },
		// Tests kill programs and servers.
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) },
	}}
	s := httptest.NewServer(g)
	e.atEnd = append(e.atEnd, s.Close) // waits for its clients to be gone
	g.url = s.URL
	return g
}

// openKubeGate opens a gate before the API server, and returns a kubeconfig that
// leads through it.
func (e *env) openKubeGate() (g *gate, kubeconfig string) {
	e.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", e.cluster.Kubeconfig)
	e.must(err)
	transport, err := rest.TransportFor(cfg)
	e.must(err)
	g = e.openGate(cfg.Host, transport)
	const name = "gate"
	kubeconfig = filepath.Join(e.site.Dir(), name+".kubeconfig")
	e.must(clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{name: {Server: g.url}},
		Contexts:       map[string]*clientcmdapi.Context{name: {Cluster: name}},
		CurrentContext: name,
	}, kubeconfig))
	return g, kubeconfig
}

// setShut makes the gate abort all requests, or no longer.
func (g *gate) setShut(shut bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.shut = shut
}

func (g *gate) isShut() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.shut
}

// arm makes the gate stop a request.
func (g *gate) arm(at stopAt) *stop {
	s := &stop{stopAt: at, reached: make(chan struct{}), letGo: make(chan struct{}), over: make(chan struct{})}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.armed = s
	return s
}

// take returns the stop for a request, if it is to be stopped.
func (g *gate) take(r *http.Request, body []byte) *stop {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.armed
	if s == nil || r.Method != s.method || !strings.Contains(string(body), s.body) {
		return nil
	}
	if ok, err := filepath.Match(s.path, r.URL.Path); err != nil || !ok {
		return nil
	}
	g.armed = nil
	return s
}

func (g *gate) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if g.isShut() {
		panic(http.ErrAbortHandler) //nolint:forbidigo // how a handler aborts
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client is gone
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	s := g.take(r, body)
	if s == nil {
		g.proxy.ServeHTTP(w, r)
		return
	}
	defer close(s.over)
	if s.answered {
		answer := httptest.NewRecorder()
		g.proxy.ServeHTTP(answer, r.WithContext(context.WithoutCancel(r.Context())))
		if s.wait(r.Context()) {
			maps.Copy(w.Header(), answer.Header())
			w.WriteHeader(answer.Code)
			_, _ = w.Write(answer.Body.Bytes())
		}
		return
	}
	if s.wait(r.Context()) {
		g.proxy.ServeHTTP(w, r)
	}
}

// wait holds the request up. It returns false when the program that made it is
// gone.
func (s *stop) wait(ctx context.Context) bool {
	close(s.reached)
	select {
	case <-s.letGo:
		return true
	case <-ctx.Done():
		return false
	}
}

// await waits until a stop's channel is closed. What completes the sentence
// "waited until the request ...".
func (e *env) await(s *stop, what string, closed <-chan struct{}) {
	e.Helper()
	e.eventually(fmt.Sprintf("the request %s (%s)", what, s), func(context.Context) error {
		select {
		case <-closed:
			return nil
		default:
			return errors.New("not yet")
		}
	})
}
