package drivertest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// Short names for what most checks ask for, and want.
const (
	create = bench.Create
	remove = bench.Delete
	ok     = driverv1.Code_CODE_OK
)

// Of a driver's check, as package bench has them.
type (
	// A Config says which driver to check and what it is to be given.
	Config = bench.Config
	// A Class is a MachineClass as far as drivers see it.
	Class = bench.Class
	// A Reference names a Secret; the zero value names none.
	Reference = bench.Reference
	// A Secret is what a Kubernetes Secret holds.
	Secret = bench.Secret
	// An Exception is a clause that the driver cannot keep, with the reason and what it costs.
	Exception = bench.Exception
	// A Cloud is what the suite may ask of the driver's cloud.
	Cloud = bench.Cloud
	// A Process is one running replica of the driver.
	Process = bench.Process
)

// A suite is what all checks of one driver share.
type suite struct {
	bench  *bench.Bench
	groups nodeGroups
	// listsByClass: the driver asks for the class to list.
	listsByClass bool
}

// A check is one clause's, or a part of the suite's own business with the driver. It ends where it finds something wrong.
type check struct {
	*bench.Check

	suite *suite
}

func (s *suite) run(ctx context.Context, f func(*check)) error {
	return s.bench.Run(ctx, func(c *bench.Check) { f(&check{c, s}) })
}

// complete sets defaults, and returns an error that names all that is wrong.
func complete(cfg Config) (Config, error) {
	var errs []error
	for _, id := range slices.Concat(cfg.Only, cfg.MaySkip) {
		if !isClause(id) {
			errs = append(errs, fmt.Errorf("unknown clause %q", id))
		}
	}
	errs = append(errs, validExceptions(cfg.Except)...)
	if len(cfg.MaySkip) > 0 && !cfg.Strict {
		errs = append(errs, errors.New("clauses that may be skipped are only of use with strict: set it"))
	}
	cfg, err := cfg.Complete()

	return cfg, errors.Join(append(errs, err)...)
}

// open connects, waits for the driver and finds out what kind it is, and whether it can be checked.
func open(ctx context.Context, cfg Config) (*suite, error) {
	cfg, err := complete(cfg)
	if err != nil {
		return nil, err
	}
	s := &suite{groups: nodeGroups{were: map[string]*group{}}}
	if s.bench, err = bench.Open(ctx, cfg); err != nil {
		return nil, cmp.Or(context.Cause(ctx), err)
	}
	err = s.run(ctx, func(c *check) {
		if c.NodeGroup != "" && !c.Serves(driverv1.Operation_OPERATION_NODE_GROUPS) {
			c.Failf("node group %s is to be checked, and the driver does not say that it serves any: "+
				"OPERATION_NODE_GROUPS is not among the capabilities of its sessions", c.NodeGroup)
		}
		c.preflight()
	})
	if err != nil {
		s.bench.Close()

		return nil, cmp.Or(context.Cause(ctx), err)
	}

	return s, nil
}
