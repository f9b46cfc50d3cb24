package driversdk

import (
	"context"
	"encoding/json"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// An OldClass is a provider-specific class of an API kind from before there were
// MachineClasses.
type OldClass struct {
	Kind       string
	APIVersion string
	// Object is the JSON of the whole object.
	Object json.RawMessage
}

// A ClassMigrator is a [Driver] that can write an older class as a MachineClass,
// whose JSON it returns. It changes nothing [MIGRATECLASS-1].
type ClassMigrator interface {
	MigrateClass(ctx context.Context, old OldClass) (machineClass json.RawMessage, err error)
}

func migrateClass(ctx context.Context, c *call, driver ClassMigrator) (*driverv1.Result, error) {
	body := c.task.Request.GetMigrateClass()
	class, err := driver.MigrateClass(ctx, OldClass{
		Kind: body.GetKind(), APIVersion: body.GetApiVersion(), Object: body.GetObject(),
	})
	if err != nil {
		return nil, err
	}

	return &driverv1.Result{Payload: &driverv1.Result_MigrateClass{
		MigrateClass: &driverv1.MigrateClassResponse{MachineClass: class},
	}}, nil
}
