package main

import (
	"context"
	"errors"

	"google.golang.org/grpc"

	"github.com/machinebus/machinebus/cmd/mcm-grpc-bridge/servicepb"
	"github.com/machinebus/machinebus/driversdk/external"
)

// serviceData asks the manager for classes and secrets in the form of package service.
type serviceData struct{ client servicepb.ServicegrpcClient }

func (d serviceData) GetMachineClass(meta *external.MachineClassMeta) (any, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	out, err := d.client.GetMachineClass(ctx, &servicepb.MachineClassMeta{Name: meta.Name, Revision: meta.Revision})
	if err == nil && out.GetError() != "" {
		err = errors.New(out.GetError())
	}

	return out.GetData(), err
}

func (d serviceData) GetSecret(meta *external.SecretMeta) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	out, err := d.client.GetSecret(ctx, &servicepb.SecretMeta{
		SecretName: meta.SecretName, NameSpace: meta.SecretNameSpace, Revision: meta.Revision,
	})
	if err == nil && out.GetError() != "" {
		err = errors.New(out.GetError())
	}

	return out.GetData(), err
}

// serveService registers in the form of package service, and makes the calls one by one until the stream ends.
func serveService(ctx context.Context, conn *grpc.ClientConn, kind string) error {
	client := servicepb.NewServicegrpcClient(conn)
	provider := &oldProvider{data: serviceData{client}}
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
		out := &servicepb.DriverSide{OperationID: in.GetOperationID(), OperationType: in.GetOperationType()}
		switch in.GetOperationType() {
		case "register":
			out.Response = &servicepb.DriverSide_RegisterResp{RegisterResp: &servicepb.DriverSideRegisterationResp{
				Name: "externalDriver", Group: "machine.sapcloud.io", Version: "v1alpha1", Kind: kind,
			}}
		case "create":
			r := &servicepb.DriverSideCreateResp{}
			r.ProviderID, r.Nodename, err = provider.Create(meta, params.GetCredentials(), params.GetMachineID(), params.GetMachineName())
			r.Error = oldError(err)
			out.Response = &servicepb.DriverSide_Createresponse{Createresponse: r}
		case "delete":
			r := &servicepb.DriverSideDeleteResp{Error: oldError(provider.Delete(meta, params.GetCredentials(), params.GetMachineID()))}
			out.Response = &servicepb.DriverSide_Deleteresponse{Deleteresponse: r}
		case "list":
			names, err := provider.List(meta, params.GetCredentials(), params.GetMachineID())
			r := &servicepb.DriverSideListResp{Error: oldError(err)}
			for id, name := range names {
				r.List = append(r.List, &servicepb.DriverSideMachine{MachineID: id, MachineName: name})
			}
			out.Response = &servicepb.DriverSide_Listresponse{Listresponse: r}
		}
		_ = stream.Send(out) // its error was ignored in 2018
	}
}
