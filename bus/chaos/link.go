// Package chaos breaks TCP connections on purpose, between a program and a server that
// know nothing of it. Tests and the fault suite use it; no product does.
package chaos

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"
)

// A Direction is one half of a connection.
type Direction int

// The halves of a [Link].
const (
	ToServer Direction = iota
	ToClient
)

const (
	linkChunk = 32 << 10
	// linkQueue is how many chunks may be in flight in one direction. When it is full the
	// sender's socket fills up, as with a slow network.
	linkQueue = 256
	// linkIdle is after how long without traffic a closed connection does not count as
	// a hit: its users do not notice until they need it.
	linkIdle = time.Second
)

// A Link is a TCP proxy that can break connections. Unless it is cut it loses nothing:
// data held back arrives later. Its methods are safe for concurrent use.
type Link struct {
	target   string
	listener net.Listener
	ctx      context.Context
	stop     context.CancelFunc
	work     sync.WaitGroup

	mu      sync.Mutex
	changed chan struct{} // closed and replaced with each change
	held    map[Direction]bool
	delay   time.Duration
	cut     bool
	conns   map[net.Conn]struct{}
	last    time.Time // when data was last sent
	hits    int
}

// OpenLink starts a link to a server's address on a free port of the loopback
// interface.
func OpenLink(ctx context.Context, target string) (*Link, error) {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("open a link to %s: %w", target, err)
	}
	l := &Link{
		target: target, listener: listener, changed: make(chan struct{}),
		held: map[Direction]bool{}, conns: map[net.Conn]struct{}{},
	}
	l.ctx, l.stop = context.WithCancel(ctx)
	l.work.Go(l.accept)
	return l, nil
}

// Address returns the address for clients.
func (l *Link) Address() string { return l.listener.Addr().String() }

// Clients returns the number of connected clients.
func (l *Link) Clients() int {
	l.mu.Lock()
	defer l.mu.Unlock()

	return len(l.conns) / 2 // each has two ends
}

// Hits counts what the link has broken since it was opened or last mended: chunks held
// back or delayed, connections closed while in use, and connections refused. It is 0 if
// no client or server can have noticed anything.
func (l *Link) Hits() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.hits
}

// Cut closes all connections, and new ones as they come, until Mend.
func (l *Link) Cut() {
	l.change(func() {
		l.cut = true
		if time.Since(l.last) < linkIdle {
			l.hits += len(l.conns)
		}
		for c := range l.conns {
			_ = c.Close()
		}
	})
}

// Drop closes all connections. Clients may connect again at once.
func (l *Link) Drop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.conns {
		_ = c.Close()
	}
	clear(l.conns)
}

// Hold holds back data in one direction until Mend, without closing connections.
func (l *Link) Hold(d Direction) { l.change(func() { l.held[d] = true }) }

// Delay delays data in both directions by d until Mend.
func (l *Link) Delay(d time.Duration) { l.change(func() { l.delay = d }) }

// Mend undoes Cut, Hold and Delay. Data held back arrives.
func (l *Link) Mend() {
	l.change(func() {
		l.cut, l.delay, l.hits = false, 0, 0
		clear(l.held)
	})
}

// Close closes the link and its connections.
func (l *Link) Close() {
	l.stop()
	_ = l.listener.Close()
	l.Cut()
	l.work.Wait()
}

func (l *Link) change(do func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	do()
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *Link) accept() {
	for {
		client, err := l.listener.Accept()
		if err != nil {
			return
		}
		l.work.Go(func() { l.connect(client) })
	}
}

func (l *Link) connect(client net.Conn) {
	server, err := (&net.Dialer{}).DialContext(l.ctx, "tcp", l.target)
	if err != nil {
		_ = client.Close()
		return
	}
	if !l.add(client, server) {
		_ = client.Close()
		_ = server.Close()
		return
	}
	l.work.Go(func() { l.pump(client, server, ToServer) })
	l.work.Go(func() { l.pump(server, client, ToClient) })
}

func (l *Link) add(conns ...net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		l.hits++
		return false
	}
	for _, c := range conns {
		l.conns[c] = struct{}{}
	}
	return true
}

// A chunk is data in flight.
type chunk struct {
	data []byte
	read time.Time
}

func (l *Link) pump(from, to net.Conn, d Direction) {
	queue := make(chan chunk, linkQueue)
	closed := make(chan struct{})
	l.work.Go(func() {
		defer close(closed)
		defer l.drop(from, to)
		for c := range queue {
			if !l.arrives(c, d) {
				return
			}
			if _, err := to.Write(c.data); err != nil {
				return
			}
		}
	})
	defer close(queue)
	for {
		buf := make([]byte, linkChunk)
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		c := chunk{data: buf[:n], read: time.Now()}
		l.sent(c.read)
		select {
		case queue <- c:
		case <-closed:
			return
		}
	}
}

func (l *Link) sent(at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = at
}

// arrives waits until a chunk may be written. It returns false if it must be dropped.
func (l *Link) arrives(c chunk, d Direction) bool {
	for hit := false; ; {
		l.mu.Lock()
		cut, held, rest, changed := l.cut, l.held[d], time.Until(c.read.Add(l.delay)), l.changed
		if (held || rest > 0) && !hit {
			hit = true
			l.hits++
		}
		l.mu.Unlock()
		switch {
		case cut:
			return false
		case held:
			select {
			case <-changed:
			case <-l.ctx.Done():
				return false
			}
		case rest > 0:
			timer := time.NewTimer(rest)
			select {
			case <-timer.C:
			case <-changed:
			case <-l.ctx.Done():
			}
			timer.Stop()
		default:
			return l.ctx.Err() == nil
		}
	}
}

func (l *Link) drop(conns ...net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
		delete(l.conns, c)
	}
}
