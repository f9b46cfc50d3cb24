package stack

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
)

// Ports are below the range that the kernel uses for outgoing connections (32768 and up
// by default). There only another listener can take a port before its use, or while its
// server is down.
const (
	firstPort = 20000
	lastPort  = 32000
)

// handedOut are the ports that this process has returned already.
var handedOut = struct {
	sync.Mutex

	ports map[int]bool
}{ports: map[int]bool{}}

// freePorts returns n ports of the loopback interface without a listener.
func freePorts(n int) ([]int, error) {
	handedOut.Lock()
	defer handedOut.Unlock()
	var ports []int
	var last error
	for range 100 * (n + 1) {
		if len(ports) == n {
			return ports, nil
		}
		port := firstPort + rand.IntN(lastPort-firstPort)
		if handedOut.ports[port] {
			continue
		}
		l, err := net.Listen("tcp", Loopback(port))
		if err == nil {
			err = l.Close()
		}
		if err != nil {
			last = err
			continue
		}
		handedOut.ports[port] = true
		ports = append(ports, port)
	}
	return nil, errors.Join(fmt.Errorf("found fewer than %d free ports between %d and %d", n, firstPort, lastPort), last)
}

// FreePort returns a port of the loopback interface without a listener.
func FreePort() (int, error) {
	ports, err := freePorts(1)
	if err != nil {
		return 0, err
	}
	return ports[0], nil
}

// Loopback returns the address of a port of the loopback interface.
func Loopback(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }
