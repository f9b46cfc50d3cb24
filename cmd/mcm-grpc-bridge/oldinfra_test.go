package main

import (
	"context"
	"errors"

	"google.golang.org/grpc"

	"github.com/machinebus/machinebus/cmd/mcm-grpc-bridge/infrapb"
	"github.com/machinebus/machinebus/driversdk/external"
)

// infraData asks the manager for classes and secrets in the form of package infra.
type infraData struct{ client infrapb.InfragrpcClient }

func (d infraData) GetMachineClass(meta *external.MachineClassMeta) (any, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	out, err := d.client.GetMachineClass(ctx, &infrapb.MachineClassMeta{Name: meta.Name, Revision: meta.Revision})
	if err == nil && out.GetError() != "" {
		err = errors.New(out.GetError())
	}

	return out.GetData(), err
}

func (d infraData) GetSecret(meta *external.SecretMeta) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	out, err := d.client.GetSecret(ctx, &infrapb.SecretMeta{
		SecretName: meta.SecretName, NameSpace: meta.SecretNameSpace, Revision: meta.Revision,
	})
	if err == nil && out.GetError() != "" {
		err = errors.New(out.GetError())
	}

	return out.GetData(), err
}

// serveInfra registers in the form of package infra, and makes the calls one by one until the stream ends.
func serveInfra(ctx context.Context, conn *grpc.ClientConn, kind string) error {
	client := infrapb.NewInfragrpcClient(conn)
	provider := &oldProvider{data: infraData{client}}
	stream, err := client.Register(ctx)
	if err != nil {
		return err
	}
	for {
		in, err := stream.Recv()
		if err != nil {
			return err
		}
		params := in.GetOperationparams()
		meta := &external.MachineClassMeta{
			Name: params.GetMachineClassMetaData().GetName(), Revision: params.GetMachineClassMetaData().GetRevision(),
		}
		out := &infrapb.DriverSide{OperationID: in.GetOperationID(), OperationType: in.GetOperationType()}
		switch in.GetOperationType() {
		case "register":
			out.Response = &infrapb.DriverSide_RegisterResp{RegisterResp: &infrapb.DriverSideRegisterationResp{
				Name: "externalDriver", Group: "machine.sapcloud.io", Version: "v1alpha1", Kind: kind,
			}}
		case "create":
			r := &infrapb.DriverSideCreateResp{}
			r.ProviderID, r.Nodename, err = provider.Create(meta, params.GetCredentials(), params.GetMachineID(), params.GetMachineName())
			r.Error = oldError(err)
			out.Response = &infrapb.DriverSide_Createresponse{Createresponse: r}
		case "delete":
			r := &infrapb.DriverSideDeleteResp{Error: oldError(provider.Delete(meta, params.GetCredentials(), params.GetMachineID()))}
			out.Response = &infrapb.DriverSide_Deleteresponse{Deleteresponse: r}
		case "list":
			names, err := provider.List(meta, params.GetCredentials(), params.GetMachineID())
			r := &infrapb.DriverSideListResp{Error: oldError(err)}
			for id, name := range names {
				r.List = append(r.List, &infrapb.DriverSideMachine{MachineID: id, MachineName: name})
			}
			out.Response = &infrapb.DriverSide_Listresponse{Listresponse: r}
		}
		_ = stream.Send(out) // its error was ignored in 2018
	}
}
