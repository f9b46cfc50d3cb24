package replica_test

import (
	"testing"

	"github.com/machinebus/machinebus/bus/optest"
)

func TestMain(m *testing.M) { optest.Main(m) }
