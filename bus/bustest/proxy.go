package bustest

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"
)

// A Direction is one half of a connection.
type Direction int

// The halves of a proxied connection.
const (
	ToServer Direction = iota
	ToClient
)

// A Proxy stands between clients and a server and can break what is between
// them. A replica behind a Proxy that is Cut is dead as far as anybody can see:
// it says no goodbye and nothing more.
type Proxy struct {
	ctx      context.Context //nolint:containedctx // the test's
	target   string
	listener net.Listener
	work     sync.WaitGroup

	mu    sync.Mutex
	free  *sync.Cond
	held  map[Direction]bool
	cut   bool
	conns map[net.Conn]struct{}
}

// NewProxy runs a proxy to the server at url until the test ends.
func NewProxy(tb testing.TB, url string) *Proxy {
	tb.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatalf("proxy: %v", err)
	}
	p := &Proxy{
		ctx: tb.Context(), target: strings.TrimPrefix(url, "nats://"), listener: listener,
		held: map[Direction]bool{}, conns: map[net.Conn]struct{}{},
	}
	p.free = sync.NewCond(&p.mu)
	p.work.Go(p.accept)
	tb.Cleanup(func() {
		p.Cut()
		_ = listener.Close()
		p.work.Wait()
	})

	return p
}

// URL is where clients connect.
func (p *Proxy) URL() string { return "nats://" + p.listener.Addr().String() }

// Cut closes all connections, and new ones as they come, until Mend.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = true
	for c := range p.conns {
		_ = c.Close()
	}
	p.free.Broadcast()
}

// Drop closes all connections; clients may connect again at once.
func (p *Proxy) Drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
	}
	clear(p.conns)
}

// Clients is how many connections there are.
func (p *Proxy) Clients() int {
	p.mu.Lock()
	defer p.mu.Unlock()

	return len(p.conns) / 2 // each has two ends
}

// Mend lets clients connect again, and releases what was held.
func (p *Proxy) Mend() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = false
	clear(p.held)
	p.free.Broadcast()
}

// Hold keeps back what is sent in one direction, without closing anything,
// until Mend.
func (p *Proxy) Hold(d Direction) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held[d] = true
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := (&net.Dialer{}).DialContext(p.ctx, "tcp", p.target)
		if err != nil || !p.add(client, server) {
			_ = client.Close()
			if server != nil {
				_ = server.Close()
			}

			continue
		}
		p.work.Go(func() { p.pump(client, server, ToServer) })
		p.work.Go(func() { p.pump(server, client, ToClient) })
	}
}

func (p *Proxy) add(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cut {
		return false
	}
	for _, c := range conns {
		p.conns[c] = struct{}{}
	}

	return true
}

func (p *Proxy) pump(from, to net.Conn, d Direction) {
	defer func() {
		_ = from.Close()
		_ = to.Close()
		p.mu.Lock()
		delete(p.conns, from)
		p.mu.Unlock()
	}()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		p.mu.Lock()
		for p.held[d] && !p.cut {
			p.free.Wait()
		}
		p.mu.Unlock()
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}
