package bus

import (
	"fmt"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// Spoken are the versions of the contract that this package speaks.
var Spoken = Protocols{Lowest: 1, Highest: 1}

// Protocols are the versions of the contract that a peer speaks.
type Protocols struct{ Lowest, Highest uint32 }

// protocolsOf makes a range of what a peer says. One that says nothing speaks the
// first version; one that names no lowest speaks the highest alone.
func protocolsOf(lowest, highest uint32) Protocols {
	highest = max(1, highest, lowest)
	if lowest == 0 {
		lowest = highest
	}

	return Protocols{Lowest: lowest, Highest: highest}
}

func (p Protocols) String() string {
	if p.Lowest == p.Highest {
		return fmt.Sprint(p.Lowest)
	}

	return fmt.Sprintf("%d to %d", p.Lowest, p.Highest)
}

// Shares reports whether both speak some version.
func (p Protocols) Shares(other Protocols) bool {
	return p.Lowest <= other.Highest && other.Lowest <= p.Highest
}

// Refuses returns why a manager that speaks these versions cannot work with a
// replica; nil if it can.
func (p Protocols) Refuses(s *driverv1.Session) error {
	theirs := protocolsOf(s.GetProtocolMin(), s.GetProtocol())
	if p.Shares(theirs) {
		return nil
	}
	remedy := "upgrade the driver"
	if theirs.Lowest > p.Highest {
		remedy = "upgrade mcm"
	}

	return fmt.Errorf("driver replica %s of provider %s (version %s) speaks protocol version %s, and mcm speaks %s: %s",
		s.GetReplica(), s.GetProvider(), s.GetVersion(), theirs, p, remedy)
}

// RefusesHello returns why a replica that speaks these versions cannot work with the
// manager that leads; nil if it can.
func (p Protocols) RefusesHello(h *driverv1.Hello) error {
	theirs := protocolsOf(h.GetProtocolMin(), h.GetProtocolMax())
	if p.Shares(theirs) {
		return nil
	}
	remedy := "upgrade mcm"
	if theirs.Lowest > p.Highest {
		remedy = "upgrade this driver"
	}

	return fmt.Errorf("manager %s (version %s) of control plane %s speaks protocol version %s, and this driver speaks %s: %s",
		h.GetMcm(), h.GetVersion(), h.GetCluster(), theirs, p, remedy)
}

// Refused returns why managers of this build give a replica no work: they share no
// version of the protocol with it. It is nil if they do.
func Refused(s *driverv1.Session) error { return Spoken.Refuses(s) }
