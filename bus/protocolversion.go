package bus

import (
	"fmt"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// spoken are the versions of the contract that this package speaks.
var spoken = protocols{lowest: 1, highest: 1}

// protocols are the versions of the contract that a peer speaks.
type protocols struct{ lowest, highest uint32 }

// protocolsOf makes a range of what a peer says. One that says nothing speaks the
// first version; one that names no lowest speaks the highest alone.
func protocolsOf(lowest, highest uint32) protocols {
	highest = max(1, highest, lowest)
	if lowest == 0 {
		lowest = highest
	}

	return protocols{lowest: lowest, highest: highest}
}

func (p protocols) String() string {
	if p.lowest == p.highest {
		return fmt.Sprint(p.lowest)
	}

	return fmt.Sprintf("%d to %d", p.lowest, p.highest)
}

// shares reports whether both speak some version.
func (p protocols) shares(other protocols) bool {
	return p.lowest <= other.highest && other.lowest <= p.highest
}

// refuses returns why a manager that speaks these versions cannot work with a
// replica; nil if it can.
func (p protocols) refuses(s *driverv1.Session) error {
	theirs := protocolsOf(s.GetProtocolMin(), s.GetProtocol())
	if p.shares(theirs) {
		return nil
	}
	remedy := "upgrade the driver"
	if theirs.lowest > p.highest {
		remedy = "upgrade mcm"
	}

	return fmt.Errorf("driver replica %s of provider %s (version %s) speaks protocol version %s, and mcm speaks %s: %s",
		s.GetReplica(), s.GetProvider(), s.GetVersion(), theirs, p, remedy)
}

// refusesHello returns why a replica that speaks these versions cannot work with the
// manager that leads; nil if it can.
func (p protocols) refusesHello(h *driverv1.Hello) error {
	theirs := protocolsOf(h.GetProtocolMin(), h.GetProtocolMax())
	if p.shares(theirs) {
		return nil
	}
	remedy := "upgrade mcm"
	if theirs.lowest > p.highest {
		remedy = "upgrade this driver"
	}

	return fmt.Errorf("manager %s (version %s) of control plane %s speaks protocol version %s, and this driver speaks %s: %s",
		h.GetMcm(), h.GetVersion(), h.GetCluster(), theirs, p, remedy)
}

// Refused returns why managers of this build give a replica no work: they share no
// version of the protocol with it. It is nil if they do.
func Refused(s *driverv1.Session) error { return spoken.refuses(s) }
